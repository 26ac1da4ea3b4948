// SPDX-License-Identifier: Apache-2.0
// Decompression of chunks by c-blosc (github.com/Blosc/c-blosc), which is opened when the first such chunk is read.
#pragma once

#include <string>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

// Decompresses a buffer of Blosc 1 into the beginning of `out` and returns its decompressed size. Fails if the library
// is not installed (unsupported), if the buffer is damaged, or if it does not fit into `out` (both corrupt). `place`
// names the buffer in errors. Thread-safe.
Result<std::size_t> unblosc_chunk(Bytes in, MutableBytes out, const std::string& place);

}  // namespace reshard
