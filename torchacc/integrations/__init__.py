"""Other libraries' trainers on torchacc's engines; each module needs its library."""
