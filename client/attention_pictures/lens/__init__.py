"""Pictures of lenses: layers down, tokens across, the token of the largest logit in each cell."""
