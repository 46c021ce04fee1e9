"""Training LongNets: the loop (`trainer`), its settings, data, checkpoints, metrics and supervision."""
