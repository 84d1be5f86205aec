"""The CPU's own step: a decoder of the Llama family in C++, compiled where it runs, for exactly that processor.

An option, never a need: without a compiler, on another processor, or for a model it does not cover, the torch model
runs instead and computes the same.
"""
