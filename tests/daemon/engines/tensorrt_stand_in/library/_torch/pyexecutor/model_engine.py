"""``tensorrt_llm._torch.pyexecutor.model_engine``: a decode batch of a captured size is the replay of a graph."""

import torch


class PyTorchModelEngine:
    def __init__(self, model, args):
        self.model, self.args, self.graphs = model, args, {}

    def warmup(self):
        for size in self.args.cuda_graph_config.sizes():
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size]):
                self.model.forward(tokens=size, pairs=size)

    def forward(self, batch, pairs):
        tokens = sum(r.context_chunk_size for r in batch.context_requests) + len(batch.generation_requests)
        for request in (*batch.context_requests, *batch.generation_requests):
            request.py_batch_idx = 0
        if not batch.context_requests and tokens in self.graphs:
            self.graphs[tokens].replay()
            return {"logits": tokens}
        return self.model.forward(tokens=tokens, pairs=pairs)
