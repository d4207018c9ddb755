"""pcpbench: do captured graphs under context parallelism still compute what eager computes?"""

__version__ = "0.1.0"
