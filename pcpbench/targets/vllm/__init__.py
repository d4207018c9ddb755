"""The installed vLLM's worker classes on the stand.

The one package that imports vllm, and only once it is asked for: importing this package costs
nothing. host.py makes vLLM run here, api.py finds out which generation of it is installed.
"""
