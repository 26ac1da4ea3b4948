// The files that lie beside the tensors of a model, whatever the format: its config, its tokenizer, and the manifest
// that reshard writes. They are copied as they are, so a link among them must not lead out of the checkpoint.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

inline constexpr Index kMaxSideFile = Index{256} << 20;  // bytes of a tokenizer's file

// A file that lies beside the tensors.
struct SideFile {
  std::string name;  // in the output
  std::string text;
  std::string path;  // where it is copied from; empty: it is `text`
  Index bytes = 0;   // of what is copied, when it was found

  Result<Index> size() const;
  Result<std::string> read() const;
};

inline constexpr std::string_view kConfigFile = "config.json";
inline constexpr std::string_view kManifestFile = "reshard_manifest.json";
inline constexpr Index kMaxManifestBytes = Index{1} << 30;

// Where the file at `path`, found in `directory`, really is, if that is outside: neither below the directory nor, for a
// snapshot of the Hugging Face cache, among its blobs (snapshots/REVISION/file -> ../../blobs/HASH).
std::optional<std::string> leads_out(const std::string& path, const std::string& directory);

// The files in a directory, and in directories of it, whose names match one of these patterns (glob_match, a part of
// the path at a time), by their names from there on: "tokenizer.json", "1_Pooling/config.json". In the patterns' order.
Result<std::vector<std::string>> files_like(const std::string& directory, std::span<const std::string_view> patterns);

// The files of an output of reshard in this directory: those that its manifest records and that have the length
// recorded, the manifest itself and config.json. Nothing if there is no manifest, or one that records no files. Corrupt
// if the manifest cannot be read.
Result<std::optional<std::vector<std::string>>> files_of_manifest(const std::string& directory);

}  // namespace reshard
