"""Request bodies and response objects of the OpenAI API, as far as this server speaks it."""
