"""The page at `/`: what browsers get, and the endpoint that hands it out."""
