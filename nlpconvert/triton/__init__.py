"""A model repository for Triton, and a served model held against PyTorch. `repository` writes, `serving` asks.

`plan` and `config` are what a server is told, `server` a Triton of our own, `endpoints` the protocol's words; `models`
holds what is copied into a repository and runs there.
"""
