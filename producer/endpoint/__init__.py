"""`producer bench-endpoint`: how fast any server answers that speaks OpenAI's API. Knows no queue and no engine."""
