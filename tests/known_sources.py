"""Classes of the installed transformers, read for a process that has imported this, and for its forks.

In a home of its own each daemon and each controller would read transformers' 1,600 files again.
"""

from __future__ import annotations

from daemon.torch_engine.model.architectures import installed_transformers

installed_transformers()
