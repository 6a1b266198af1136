"""Quotes what a model will do on devices before anything is built.

`sources.py` finds a model's shapes, quality curves and signals; `decide.py` searches, for each device, as `allocate`
does, and replays signals through the runtime's store on simulated flash; `show.py` prints. Nothing reads a weight.
"""
