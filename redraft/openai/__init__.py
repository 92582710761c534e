"""The `/v1` front end: OpenAI's API over HTTP, in a process of its own that talks to the engine worker."""
