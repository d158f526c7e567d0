"""The OpenAI gateway: a process of its own that forwards requests to workers by the last route table it was given.

Raw ASGI in, a pool of HTTP/1.1 connections out. It knows routes.json and the workers' OpenAI API; it knows nothing
of the controller, of plans, or of engines. Folders of LoRA variants are those of the variant store. Started by
``python -m iserve.gateway``.
"""
