"""Graph passes that replace several nodes by fewer; each is a rule with its pattern, check and rewrite."""
