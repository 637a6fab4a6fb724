"""The HTTP door: requests become prompts of the one queue, replies become answers. `app.create_app` is its front."""
