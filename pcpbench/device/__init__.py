"""The one package that knows the device: graph backends, clocks, collectives."""
