"""The device room: which device trains, and what makes Megatron run on a CPU.

Promise: on a machine with a GPU nothing here changes Megatron unless ``--device cpu`` is given.
"""
