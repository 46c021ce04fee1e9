"""The small base that the library and the tools share: launching ranks, device memory, collectives, files, settings."""
