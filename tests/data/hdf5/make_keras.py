"""Makes keras.weights.h5, and keras.h5 in Keras's older format: one layer in bfloat16, with the kernel
[[0, 1], [2, 3], [4, 5]] and the bias [6, 7] (Keras 3.15.1, on JAX, with h5py 3.16)."""
import pathlib

import keras
import numpy

here = pathlib.Path(__file__).parent
layer = keras.layers.Dense(2, dtype="bfloat16")
model = keras.Sequential([keras.Input((3,)), layer])
layer.set_weights([numpy.arange(6).reshape(3, 2), numpy.array([6, 7])])
model.save_weights(here / "keras.weights.h5")
model.save(here / "keras.h5")
