"""Where a request goes and how it comes back: tokens, policy, dispatch and the OpenAI API."""
