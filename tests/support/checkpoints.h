// Checkpoints as values in memory, for tests: reads all tensors, writes given tensors, and copies samples.
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

// Locates and reads all tensors of an open checkpoint and checks their recorded checksums.
Result<TensorValues> load_values(Reader& reader);
// Reads all tensors of a checkpoint in any format. Fails and ends the test if it cannot be read.
TensorValues load_checkpoint(const std::string& path);

// Writes the tensors of a target into a new directory.
void write_target(const TensorValues& tensors, Target& target, const std::string& path);

// Writes a DCP checkpoint of these tensors, sharded along dimension 0 over the ranks of `mesh`.
void write_dcp(const TensorValues& tensors, const std::string& path, const Mesh& mesh);

// Returns the bytes of a stored tensor chunk at `offset` of its file.
std::string dcp_item(DType dtype, const Dims& shape, Index offset, std::string_view payload);

// sample() returns "samples/checkpoints/<name>"; the copy of its checkpoint and config.json is at `into`/checkpoint and
// `into`/config.json.
std::string sample(const std::string& name);
std::string sample_checkpoint(const std::string& name);  // its checkpoint, to read only
void copy_sample(const std::string& name, const std::string& into);

// Returns "tests/data/<name>".
std::string test_data(const std::string& name);

// Opens a path as a given format, even if the format does not recognise it.
Result<std::unique_ptr<Reader>> open_with(const Format& format, const std::string& path,
                                          const OpenOptions& options = {});
// Returns whether a format recognises a path.
bool recognises(const Format& format, const std::string& path);
// Returns the error of opening a checkpoint, with its path replaced by "D"; empty if it can be opened.
std::string error_of_opening(const std::string& path);

std::string read_file(const std::string& path);
void write_file(const std::string& path, std::string_view bytes);
// Returns the content of every file below a directory, by relative path.
std::map<std::string, std::string> all_files(const std::string& directory);
// Returns the files of an output: those below a directory, or a single one, named "".
std::map<std::string, std::string> files_at(const std::string& path);

}  // namespace reshard
