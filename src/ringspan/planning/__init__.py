"""What is to be computed: tiles, from patterns and plain integers. Knows no tensor and no device."""

from ringspan.planning.tiles import Plan, Tile, plan_rows

__all__ = ["Plan", "Tile", "plan_rows"]
