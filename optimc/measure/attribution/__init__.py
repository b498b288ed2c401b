"""Attribution: what each pass and each runtime feature of a recipe gains, alone and one upon the other."""
