"""What the commands share: the machine, devices, FLOPs, the wire, other rings, prices of plans, pages of results."""
