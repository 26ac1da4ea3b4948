// Models that differ in known elements, made by the program.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace reshard {

// Writes a bfloat16 model of the shapes of the sample "tp8" to `path`, as Hugging Face files without a manifest. The
// lower byte of each element, at offset `at` in the file, becomes change(at, byte). Returns `path`.
std::string write_changed_model(const std::string& path, const std::function<char(std::size_t at, char byte)>& change);

// Converts a checkpoint with these options of `reshard convert`. Returns `to`.
std::string converted(const std::string& from, const std::string& to, std::vector<std::string> options);

}  // namespace reshard
