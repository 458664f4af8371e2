"""From step plans to tokens: batches, forwards, the physical pool."""
