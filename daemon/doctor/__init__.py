"""What `foretick doctor` looks at: facts are gathered apart from the judgement on them."""
