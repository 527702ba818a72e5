"""A LightningModule for each task: what a step computes, what is logged, how it is optimised."""
