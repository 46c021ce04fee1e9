"""The base that library and tools share: local ranks, device memory, collectives, durable files, settings."""
