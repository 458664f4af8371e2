"""How a row of logits becomes a token: parameters, logits processing, sampling, log-probabilities."""
