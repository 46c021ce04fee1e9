"""The sampled proof: where no dense oracle fits, places are drawn and computed anew in fp64, from the definition."""
