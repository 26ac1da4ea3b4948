// SPDX-License-Identifier: Apache-2.0
// Decodes a zstd frame around a whole item, as DCP's stream.zstd/1 transform writes it: without content size or
// checksum. Written by: torch/distributed/checkpoint/_extension.py (ZStandard). Frame format: RFC 8878.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/file.h"

namespace reshard::zstd {

inline constexpr std::string_view kMagic{"\x28\xb5\x2f\xfd", 4};

// Decodes the frame in [offset, offset + length) of `file` piece by piece into `out`, from `out_offset` on. Returns the
// number of bytes written. Fails with kCorrupt if they exceed `limit`, as a small frame can decode to any size.
Result<Index> decode(const File& file, Index offset, Index length, Index limit, const File& out, Index out_offset);

// Like the above, into memory that is allocated as needed. `place` names the frame in errors.
Result<std::string> decode(Bytes frame, Index limit, const std::string& place);

// Returns how many decoded bytes a decoder of this frame must keep (its window), from the frame's first bytes; 18 are
// enough. 0 if they do not begin a frame.
Index window_bytes(Bytes start);

}  // namespace reshard::zstd
