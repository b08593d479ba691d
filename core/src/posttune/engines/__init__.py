"""What plugins for engines share: a process for the engine, weights on their way, checks before a start.

A backend whose engine holds weights of its own (vLLM, SGLang) subclasses ``backend.EngineBackend`` and says
what is the engine's alone. Public for plugins; no module here imports torch before it is needed.

===============  =====================================================================================
``backend``      the hooks, and their state: versions, loads that broke off, what is compared by checksum
``link``         what a backend asks of an engine; the plan of an engine that is to be started
``process``      an engine in a process of its own, seen from the trainer
``service``      the same, seen from that process
``frames``       messages between the two
``answers``      prompts and completions as numbers
``ends``         where an answer ends, the same for every engine
``buckets``      weights between processes: GPU memory by handle, everything else by file
``weights``      weights checked against the model's files, and compared with what arrived
``requests``     requests refused by name, and their seeds
``facts``        what a model's folder says of itself
``folder``       a folder for an engine where the model has none
``preflight``    the model, the run and the machine against each other
``environment``  the variables of an engine's process
``installed``    which distribution of an engine is there, from metadata
``table``        an engine's free table of arguments against the names that it has
``ledger``       who holds an accelerator's memory
``problems``     what an engine said, as one of posttune's errors
===============  =====================================================================================
"""
