// Whole checkpoints as values, for tests: read all of one, write one of given tensors, take a sample apart.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/dcp/metadata.h"
#include "lib/checkpoint/format.h"

namespace reshard {

struct TensorValue {
  DType dtype = DType::kFloat32;
  Dims shape;
  std::string bytes;  // row-major, little-endian

  friend bool operator==(const TensorValue&, const TensorValue&) = default;
};
using TensorValues = std::map<std::string, TensorValue>;

// Every tensor of an open checkpoint: located, read, and its checksums held against the bytes.
Result<TensorValues> load_values(Reader& reader);
// The same of a checkpoint of any format. Fails the test and ends it when it cannot be read.
TensorValues load_checkpoint(const std::string& path);

// Writes these tensors, which are those of the target, into a new directory as the target has it.
void write_target(const TensorValues& tensors, Target& target, const std::string& path);

// Writes a DCP checkpoint of these tensors, cut along dimension 0 over the ranks of `mesh`.
void write_dcp(const TensorValues& tensors, const std::string& path, const Mesh& mesh);

// The bytes of one stored tensor chunk, to lie at `offset` of its file.
std::string dcp_item(DType dtype, const Dims& shape, Index offset, std::string_view payload);

// "samples/checkpoints/<name>", and a copy of its checkpoint and config.json: `into`/checkpoint, `into`/config.json.
std::string sample(const std::string& name);
void copy_sample(const std::string& name, const std::string& into);

// "tests/data/<name>"
std::string test_data(const std::string& name);

// Opens what is at a path as a format's, whether it is recognised or not.
Result<std::unique_ptr<Reader>> open_with(const Format& format, const std::string& path,
                                          const OpenOptions& options = {});
// Whether a format takes what is at a path for its own.
bool recognises(const Format& format, const std::string& path);
// Why a checkpoint cannot be opened, its path as "D"; empty where it can.
std::string error_of_opening(const std::string& path);

std::string read_file(const std::string& path);
void write_file(const std::string& path, std::string_view bytes);
// Every file below a directory (names relative to it) and its bytes.
std::map<std::string, std::string> all_files(const std::string& directory);

}  // namespace reshard
