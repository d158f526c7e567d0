"""Interfaces for people: the command line, the REST intent API, the OpenAI gateway, and the controller behind
them.
"""

__version__ = "0.1.0"
