"""What PPOTrainer and GRPOTrainer share: an RL stage that a script drives, pass by pass."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from posttune.checkpoint.gather import export_live
from posttune.config.load import dump_yaml, load_config
from posttune.config.models import RlBatchConfig, RlStage, RunConfig
from posttune.config.trainer_options import TrainerOptions
from posttune.config.trainer_problems import in_terms_of, read_options
from posttune.data.dataset import SampleDataset
from posttune.distributed import watch
from posttune.distributed.ranks import Ranks
from posttune.errors import DataError, Interrupted, UserError
from posttune.facade import Rewards, build_observers
from posttune.files import atomic_write_text
from posttune.loss.controllers import KLController
from posttune.memory.oom import explained
from posttune.memory.residence import resident
from posttune.models.hf_model import HFModel
from posttune.nearest import nearest
from posttune.reward.objects import given_rewards
from posttune.rollout.requests import derive_seed
from posttune.run.environment import write_environment
from posttune.run.folder import RunFolder, StageMarker
from posttune.run.interrupt import InterruptFlag
from posttune.run.resume import digest, make_plan, stage_settings
from posttune.run.stages import StageContext
from posttune.trainer._epochs import EpochMetrics, EpochPrompts, EpochWork
from posttune.trainer.checks import check_stage
from posttune.trainer.loop import Loop, Position
from posttune.trainer.rl import prepare
from posttune.trainer.rl_step import RlWork
from posttune.trainer.stage import Setup, checkpoints_of, reported, seed_generators

KL_FILE = "kl_coef.json"


class RlTrainer:
    """An RL stage without a configuration file. Make a subclass, not this.

    ``reward_fn``: a function of ``prompt``, ``response``, ``reference`` and data columns, by name; an
    instance of ``BaseRewardFunction``; the name of an installed reward; or a list, or a dict by label,
    of these. Where ``output_dir`` holds a checkpoint of the same configuration and data, training goes
    on from it; what else is there is refused. Ctrl-C ends the step, leaves a checkpoint and raises
    Interrupted. Raises ConfigError, UserError, DataError, ModelError and CheckpointError.
    """

    name: ClassVar[str]
    Options: ClassVar[type[TrainerOptions]]

    def __init__(
        self,
        *,
        actor_model: HFModel | str | Path,
        critic_model: HFModel | str | Path | None,
        reward_fn: Any,
        dataset: SampleDataset | str | Path,
        config: Mapping[str, Any] | None,
    ) -> None:
        options = read_options(self.Options, config)
        dataset = dataset if isinstance(dataset, SampleDataset) else SampleDataset(dataset)
        given = given_rewards(reward_fn, options.reward)
        check_needs(given.rewards, dataset)
        self.options = options
        with ExitStack() as stack:
            output = options.training.output_dir or stack.enter_context(tempfile.TemporaryDirectory())
            stage = options.stage() | {"rewards": [ref.model_dump() for ref in given.refs]}
            if given.weights:
                stage.setdefault("reward_manager", {}).setdefault("options", {})["weights"] = given.weights
            stage["model"] = _described(actor_model, critic=False).config.model_dump()
            stage["data"] = {"path": str(dataset.folder), **stage.get("data", {})}
            self.steps_per_epoch = _steps_per_epoch(options, len(dataset))
            stage["steps"] = _passes(options, self.steps_per_epoch) * self.steps_per_epoch
            if critic_model is not None:
                critic = _described(critic_model, critic=True).config.model_dump()
                stage["critic"] = {"model": critic, **stage.get("critic", {})}
            with in_terms_of(self.Options, self.name):
                run = load_config(options.run(self.name, stage, Path(output))).config
                self._open(run, given.rewards, stack)
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def _open(self, run: RunConfig, rewards: Rewards, stack: ExitStack) -> None:
        """Take the folder, load everything, and go on from the last checkpoint."""
        stage = run.stages[self.name]
        assert isinstance(stage, RlStage)
        ranks = Ranks.current(run.device, parallel=run.parallel)
        stack.callback(ranks.close)
        check_stage(self.name, stage, world=ranks.data_world)
        folder = RunFolder(run.output)
        if self._writes and ranks.main:
            _take(folder, run, self.name, stack)
        ranks.barrier("folder")
        _set_threads(run.threads)
        self._context = StageContext(
            run=run,
            name=self.name,
            folder=folder,
            observers=build_observers(run.observers if ranks.main else []),
            resume=True,
            outputs={},
            interrupt=InterruptFlag(),
            ranks=ranks,
        )
        self._setup = self._prepared(stage, rewards, stack)
        self._checkpoints = checkpoints_of(self._setup, self._context)
        seed_generators(derive_seed(run.seed, self.name, ranks.data_rank))
        self._position = self._checkpoints.restore() if self._writes else Position()
        self._restore_coefficient()
        self._setup.work.begin(self._position)

    def _prepared(self, stage: RlStage, rewards: Rewards, stack: ExitStack) -> Setup:
        setup = prepare(stage, self._context, stack, rewards)
        work = setup.work
        assert isinstance(work, RlWork)
        work.collector = replace(work.collector, stream=EpochPrompts.like(work.collector.stream))
        self._rl, self._work = work, EpochWork(work)
        return replace(setup, work=self._work)

    @property
    def _writes(self) -> bool:
        return self.options.training.output_dir is not None

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete, those before a resume included."""
        return self._position.step // self.steps_per_epoch

    @property
    def step(self) -> int:
        """Steps that are done: each answers a batch of prompts and learns from it."""
        return self._position.step

    @property
    def kl_ctrl(self) -> KLController:
        """Holds the KL coefficient. ``update(kl=, step=)`` moves it once; see ``KLController``."""
        return self._rl.kl_control

    @property
    def model(self) -> Any:
        """The policy, a transformers model (with adapters: around it a peft model)."""
        return self._setup.loaded.model

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self._setup.loaded.tokenizer

    def train_epoch(self) -> dict[str, float]:
        """One pass over the data; where one was interrupted, the rest of it.

        Returns ``reward`` (mean), ``reward_std`` (over all samples) and ``kl``, and the metrics of
        metrics.jsonl by name over the pass. Leaves a checkpoint where there is an ``output_dir``.
        """
        if not self._finalizer.alive:
            raise UserError("the trainer is closed", who=type(self).__name__, fix="make another one")
        total = self.options.training.total_epochs
        if total is not None and self.epoch >= total:
            fix = "loop while trainer.epoch is below it, or start a run with more"
            raise UserError(
                f"all {total} passes of training.total_epochs are done", who=type(self).__name__, fix=fix
            )
        self._keep_coefficient()
        if self._position.step % self.steps_per_epoch == 0:
            self._work.metrics = EpochMetrics()
        self._run_to((self.epoch + 1) * self.steps_per_epoch)
        return self._work.metrics.result()

    def save_model(self, path: str | Path) -> Path:
        """Write the policy as a Hugging Face folder, adapters merged, and read it back.

        Raises ExportError, and UserError where ``path`` holds something.
        """
        destination = Path(path).expanduser()
        loaded = self._setup.loaded
        with resident(loaded.model):
            export_live(loaded.model, loaded.tokenizer, destination, self._context.ranks)
        return destination

    def close(self) -> None:
        """Stop the engine and give the folder free. The end of the process does it too."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_to(self, end: int) -> None:
        context = self._context
        shown = end if self.options.training.total_epochs is None else self._setup.total_steps
        with watch.stage(self.name), self._interruptible():
            loop = self._loop(end)
            told = replace(self._setup, total_steps=shown)
            with reported(told, context, loop), self._checkpoints.finishing():
                try:
                    with explained(self.name, self._setup.config, context.ranks.device):
                        loop.run()
                finally:
                    self._position = loop.position

    def _loop(self, end: int) -> Loop:
        context = self._context
        return Loop(
            stage=self.name,
            work=self._work,
            total_steps=end,
            save=self._save,
            save_every=self._setup.config.checkpoint.every,
            validation=None,
            observers=context.observers,
            interrupt=context.interrupt,
            ranks=context.ranks,
            position=self._position,
            written=self._checkpoints.written if self._writes else None,
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C waits for the step and its checkpoint, where there is a place for one."""
        if not self._writes:
            yield
            return
        self._context.interrupt = InterruptFlag()
        try:
            with self._context.interrupt.installed():
                yield
        except Interrupted as error:
            raise Interrupted(error.what, who=error.who, fix="run the script again to go on") from error

    def _save(self, position: Position) -> Path | None:
        return self._checkpoints.save(position) if self._writes else None

    def _keep_coefficient(self) -> None:
        """Remember a coefficient that was moved by hand since the last checkpoint, which lacks the move."""
        if self._writes and self.step and self._context.ranks.main:
            kept = {"global_step": self._position.global_step, "coef": self.kl_ctrl.coef}
            atomic_write_text(self._context.folder.path / KL_FILE, json.dumps(kept) + "\n")

    def _restore_coefficient(self) -> None:
        """Where nothing is done yet, the script itself repeats what it did by hand."""
        path = self._context.folder.path / KL_FILE
        if not (self._writes and self.step and path.is_file()):
            return
        kept = json.loads(path.read_text("utf-8"))
        if kept["global_step"] == self._position.global_step:
            self.kl_ctrl.coef = float(kept["coef"])


def _steps_per_epoch(options: TrainerOptions, rows: int) -> int:
    """Steps of a pass; the last one may be smaller."""
    size = min(rows, options.data.limit or rows)
    return max(1, math.ceil(size / (options.training.batch_size or RlBatchConfig().prompts)))


def _passes(options: TrainerOptions, steps_per_epoch: int) -> int:
    """As many as are asked for; without an end, one beyond the critic's warm-up stands for them."""
    warmup = options.training.critic_warmup_steps or 0
    return options.training.total_epochs or 1 + warmup // steps_per_epoch


def check_needs(rewards: Rewards, dataset: SampleDataset) -> None:
    """Raise DataError where a reward takes a column that the data, or a row of it, has not."""
    for label, needs in rewards.needs.items():
        for name in (*needs.columns, *(["reference"] if needs.reference else [])):
            if name not in dataset.columns:
                likely = nearest(name, dataset.columns)
                hint = f" (did you mean {likely!r}?)" if likely else ""
                what = f"needs the column {name!r}, and the data has none{hint}"
                fix = f"the columns of {dataset.folder} are {', '.join(dataset.columns)}"
                raise DataError(what, who=f"reward {label!r}", fix=fix)
            if dataset.missing(name):
                what = f"needs {name!r}, which {dataset.missing(name)} of {len(dataset)} rows lack"
                raise DataError(what, who=f"reward {label!r}", fix="mend or leave out those rows")


def _described(model: HFModel | str | Path, *, critic: bool) -> HFModel:
    found = model if isinstance(model, HFModel) else HFModel(model, is_critic=critic)
    if found.is_critic and not critic:
        raise UserError(
            "is a critic: it generates nothing", who="actor_model", fix="leave out is_critic=True"
        )
    if critic and not found.is_critic:
        fix = f"write HFModel({str(found.path)!r}, is_critic=True)"
        raise UserError("is not described as a critic", who="critic_model", fix=fix)
    return found


def _take(folder: RunFolder, run: RunConfig, name: str, stack: ExitStack) -> None:
    """Lock the folder and write down what runs in it. Raises UserError where something else ran there."""
    stack.enter_context(folder.locked())
    used = folder.holds_run()
    if used and folder.read_marker(name) is None:
        fix = "choose another output_dir"
        raise UserError(f"holds a run already, and not one of {name!r}", who=str(folder.path), fix=fix)
    make_plan(run, folder, resume=used)
    if folder.read_marker(name) is None or not folder.last_checkpoint_step():
        settings = stage_settings(run, name)
        folder.write_marker(name, StageMarker("running", "rl", digest(settings), settings))
    atomic_write_text(folder.resolved, dump_yaml(run.told()))
    write_environment(folder.environment, run.told(), sys.argv)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
