from posttune import hookimpl
from posttune.types import ExportReport, Verification


class Folder:
    """A folder of transformers, one file, compared by its logits."""

    @hookimpl
    def checkpoint_exporter_export(self, source, destination):
        model = source.load_merged()
        model.save_pretrained(destination)
        files = tuple(sorted(path.name for path in destination.iterdir()))
        return ExportReport(files, model.num_parameters(), str(model.dtype).removeprefix("torch."))

    @hookimpl
    def checkpoint_exporter_verify(self, source, destination):
        import torch
        from transformers import AutoModelForCausalLM

        ids = torch.arange(1, 17)[None]
        ours, theirs = source.load_merged(), AutoModelForCausalLM.from_pretrained(destination)
        gap = (ours(ids).logits - theirs(ids).logits).detach().abs().max()
        return Verification(float(gap), tolerance=1e-3, checked_tokens=16)
