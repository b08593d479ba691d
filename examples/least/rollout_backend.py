from posttune import hookimpl
from posttune.types import BackendInfo, Completion


class Generate:
    """transformers' own generate, one request after the other, without log-probabilities."""

    @hookimpl
    def rollout_backend_start(self, context):
        from transformers import AutoModelForCausalLM

        self.model, self.version = AutoModelForCausalLM.from_pretrained(context.model_path), 0
        return BackendInfo(name="generate", logprobs="none")

    @hookimpl
    def rollout_backend_generate(self, requests, sampling):
        return [answer for request in requests for answer in self.answer(request, sampling)]

    def answer(self, request, sampling):
        import torch

        torch.manual_seed(request.seed % 2**63)
        ids = torch.tensor([request.prompt_ids] * sampling.n)
        ends = sorted(sampling.eos_ids) or None
        draw = {"do_sample": True, "temperature": sampling.temperature} if sampling.temperature else {}
        found = self.model.generate(ids, max_new_tokens=sampling.max_new_tokens, eos_token_id=ends, **draw)
        for index, row in enumerate(found[:, len(request.prompt_ids) :].tolist()):
            end = next((place + 1 for place, token in enumerate(row) if token in sampling.eos_ids), 0)
            reason = "stop" if end else "length"
            yield Completion(request.id, index, tuple(row[: end or len(row)]), None, reason, self.version)

    @hookimpl
    def rollout_backend_load_weights(self, tensors, version):
        self.model.load_state_dict(dict(tensors), strict=False)
        self.version = version
        return True

    @hookimpl
    def rollout_backend_stop(self):
        return True
