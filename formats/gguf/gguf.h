// SPDX-License-Identifier: Apache-2.0
// Models in GGUF files, llama.cpp's format (header.h). Only read: llama.cpp's converter writes them.
//
//   model-Q4_K_M.gguf                                      one file
//   model-00001-of-00003.gguf, model-00002-of-00003.gguf   a model cut by gguf-split (tools/gguf-split/gguf-split.cpp)
//
// A tensor of a plain type is an ordinary tensor. One in quantized blocks is a uint8 tensor of its bytes whose name
// ends in its type: "blk.0.attn_q.weight:Q4_K".
#pragma once

#include <optional>
#include <string>

#include "formats/gguf/header.h"
#include "lib/checkpoint/format.h"

namespace reshard {

extern const Format kGgufFormat;

namespace gguf {

inline constexpr std::string_view kEnding = ".gguf";

// The parsed name of one of several files: "model", 2 and 3 for "model-00002-of-00003.gguf".
struct SplitName {
  std::string stem;
  Index number = 1, count = 1;
};
SplitName parse_split_name(std::string_view name);

// A config.json made from a header's pairs, or the reason why there is none.
struct MadeConfig {
  std::optional<Json> config;
  std::string why_not;  // "'bert' is unknown"
};
// Makes the config.json. `tensors` has the tensors of all files of the model.
MadeConfig make_config(const Header& header, const Catalog& tensors);

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options);

}  // namespace gguf
}  // namespace reshard
