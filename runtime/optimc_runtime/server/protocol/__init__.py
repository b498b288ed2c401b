"""Request bodies of the OpenAI API, as far as this server speaks it."""
