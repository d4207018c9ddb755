"""The `host` graph backend: device-graph semantics on a CPU. Owns the public names, nothing else.

torch_private   every private torch name, each with a public fallback
source          which line of the caller's code asked for an op
schema          what an operator's schema says: what it writes, returns, and its `out` twin
rules           which operator calls a graph cannot hold, and the sentence that says so
refusals        how they are seen and refused, and what reaches no operator as well
pool            blocks of memory that graphs share, and when a block is free again
book            record tensors and the list of outside storages
statement       what one replayed op is: a callable, its baked arguments, its copies
binding         the cheapest Python spelling of a call, accepted only when a probe agrees
lowering        a functional op turned into a write into its block, accepted only bit for bit
recorder        the modes that see every op while `fn` runs
replay          recorded nodes as straight-line code
backend         capture: modes around `fn`, then a graph
"""

from pcpbench.device.host_graph.backend import HostGraphBackend
from pcpbench.device.host_graph.pool import HostPool
from pcpbench.device.host_graph.replay import HostGraph

__all__ = ["HostGraph", "HostGraphBackend", "HostPool"]
