// A colour for each rank: Okabe and Ito's for few, viridis for many. Both are readable for colour-blind people.

const FEW = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#F0E442"];
const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [110, 206, 88]];

export function rankColour(rank, size) {
  if (size <= FEW.length) return FEW[rank];
  const place = (rank / (size - 1)) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const mixed = VIRIDIS[low].map((from, i) => Math.round(from + (place - low) * (VIRIDIS[low + 1][i] - from)));
  return `rgb(${mixed.join(",")})`;
}

// The class of text on this colour.
export function textOn(rank, size) {
  if (size <= FEW.length) return [1, 4, 7].includes(rank) ? "onlight" : "onfill";
  return rank / (size - 1) > 0.7 ? "onlight" : "onfill";
}
