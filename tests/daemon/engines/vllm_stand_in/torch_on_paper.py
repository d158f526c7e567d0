"""Stands in for torch, on a GPU that is a clock: kernels advance its one stream, and nothing else does.

Strict where CUDA is: an event tells no time before the device has reached it, none is recorded while a graph is
captured, a graph is replayed only after it was.
"""

from types import SimpleNamespace


class Stream:
    def __init__(self):
        self.now_s = 0.0  # when what was queued so far will be done
        self.done_s = 0.0  # how far the device is
        self.capturing = None


stream = Stream()


class Memory:
    """Bytes of the device: torch's own, with their peak, and what lies outside of its allocator."""

    total = 48 * 2**30

    def __init__(self):
        self.allocated = self.peak = self.outside = 0

    def allocate(self, count):
        self.allocated += count
        self.peak = max(self.peak, self.allocated)

    def reset_peak(self):
        self.peak = self.allocated


memory = Memory()
device = [0]


def kernel(seconds):
    """Queue work, or take it into the graph that is captured."""
    if stream.capturing is not None:
        stream.capturing.seconds += seconds
    else:
        stream.now_s += seconds


class Event:
    def __init__(self, enable_timing=False):
        self.enable_timing, self.at_s = enable_timing, None

    def record(self):
        if stream.capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.at_s = stream.now_s

    def query(self):
        if self.at_s is None:
            raise RuntimeError("the event was not recorded")
        return self.at_s <= stream.done_s

    def elapsed_time(self, end):
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end.at_s - self.at_s)


class CUDAGraph:
    def __init__(self):
        self.seconds, self.captured = 0.0, False

    def replay(self):
        if not self.captured or stream.capturing is not None:
            raise RuntimeError("replay of a graph that was not captured, or while one is")
        stream.now_s += self.seconds


class graph:  # torch's own name
    def __init__(self, cuda_graph):
        self.graph = cuda_graph

    def __enter__(self):
        if stream.capturing is not None:
            raise RuntimeError("two captures at once")
        stream.capturing = self.graph

    def __exit__(self, *_):
        stream.capturing, self.graph.captured = None, True


def synchronize():
    stream.done_s = stream.now_s


def is_current_stream_capturing():
    return stream.capturing is not None


cuda = SimpleNamespace(
    CUDAGraph=CUDAGraph,
    Event=Event,
    graph=graph,
    is_current_stream_capturing=is_current_stream_capturing,
    current_device=lambda: device[0],
    max_memory_allocated=lambda: memory.peak,
    mem_get_info=lambda: (memory.total - memory.allocated - memory.outside, memory.total),
    memory_allocated=lambda: memory.allocated,
    memory_reserved=lambda: 7 * 2**30,
    set_device=lambda index: device.__setitem__(0, index),
    synchronize=synchronize,
)
