// Opens a Hugging Face checkpoint: one file, an indexed set, or a directory of them. See safetensors.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "lib/checkpoint/format.h"

namespace reshard {

bool is_safetensors_name(std::string_view path);  // ends in ".safetensors"
bool is_index_name(std::string_view path);        // ends in ".safetensors.index.json"

// `path` is a file, an index or a directory. With options.files_too = false the headers have to be there, the data
// behind them need not.
Result<std::unique_ptr<Reader>> open_safetensors(const std::string& path, const OpenOptions& options);

}  // namespace reshard
