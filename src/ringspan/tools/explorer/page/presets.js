// Examples: settings that differ from the defaults.
export const PRESETS = {
  "LongNet, small": {},
  "LongNet, a million tokens on 1,024 ranks": { pattern: "2048x1,8192x4,32768x16,131072x64,1048576x512", tokens: "1M", ranks: "1024", layout: "contiguous", heads: "32", kv_heads: "8", head_dim: "128" },
  "Window and dilated branches, 64k tokens": { pattern: "window 511 + 4096x4,65536x64", tokens: "64k", ranks: "8", layout: "contiguous", heads: "32", kv_heads: "8", head_dim: "128" },
  "Sliding window": { pattern: "window 6", layout: "contiguous" },
  "Full causal, zigzag": { pattern: "full", heads: "1", kv_heads: "1" },
  "Full causal, contiguous": { pattern: "full", layout: "contiguous", heads: "1", kv_heads: "1" },
  "Packed documents, balanced": { pattern: "full", lengths: "40,6*4", layout: "balanced", heads: "1", kv_heads: "1" },
  "Two nodes of four ranks": { pattern: "full", causal: false, ranks: "8", routing: "by-node", ranks_per_node: "4", layout: "contiguous", heads: "1", kv_heads: "1" },
  "Heads and ring: two head ranks": { pattern: "8x1,32x4 + window 5", ranks: "8", head_ranks: "2" },
  "An image along a Hilbert curve": { pattern: "64x1,256x4", causal: false, order: "hilbert", grid: "32x32", layout: "contiguous" },
  "The same image, row by row": { pattern: "64x1,256x4", causal: false, order: "row_major", grid: "32x32", layout: "contiguous" },
};
