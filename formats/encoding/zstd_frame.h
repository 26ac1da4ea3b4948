// SPDX-License-Identifier: Apache-2.0
// Decodes a zstd frame around a whole item, as DCP's stream.zstd/1 transform writes it: without content size or
// checksum. Written by: torch/distributed/checkpoint/_extension.py (ZStandard). Frame format: RFC 8878. Encodes frames
// with both.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

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

// Returns how many bytes a frame decodes to, from its first 18 bytes; -1 if it does not say.
Index content_bytes(Bytes start);

// Makes frames with a content size and a checksum. Thread-safe.
class FrameEncoder {
 public:
  // `limit` is the largest number of bytes in a frame.
  FrameEncoder(int level, Index limit);
  ~FrameEncoder();

  // Calls use(frame) with a frame of `bytes`, which is valid during the call.
  Status encode(Bytes bytes, const std::function<Status(Bytes frame)>& use);
  // Returns the memory in bytes that each thread takes.
  static Index memory(int level, Index limit);

 private:
  struct Context;
  std::unique_ptr<Context> take();
  const int level_;
  const Index limit_;
  std::mutex mutex_;  // protects idle_
  std::vector<std::unique_ptr<Context>> idle_;
};

}  // namespace reshard::zstd
