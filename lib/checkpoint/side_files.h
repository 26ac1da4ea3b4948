// SPDX-License-Identifier: Apache-2.0
// The files next to a model's tensors in any format: its config, its tokenizer, and the manifest that reshard writes.
// They are copied unchanged, so a link among them must not lead outside the checkpoint.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

inline constexpr Index kMaxSideFile = Index{256} << 20;  // largest tokenizer file, in bytes

// A side file, either in memory or to be copied from `path`.
struct SideFile {
  std::string name;  // in the output
  std::string text;
  std::string path;  // source of the copy; empty: the contents are `text`
  Index bytes = 0;   // size at `path` when it was found

  Result<Index> size() const;
  Result<std::string> read() const;
};

inline constexpr std::string_view kConfigFile = "config.json";
inline constexpr std::string_view kManifestFile = "reshard_manifest.json";
inline constexpr Index kMaxManifestBytes = Index{1} << 30;

// Returns the real path of the file at `path`, found in `directory`, if it is outside: neither below the directory nor,
// for a snapshot of the Hugging Face cache, among its blobs (snapshots/REVISION/file -> ../../blobs/HASH).
Result<std::optional<std::string>> leads_out(const std::string& path, const std::string& directory);

// Returns the files in a directory and its subdirectories that match one of the patterns, as relative paths:
// "tokenizer.json", "1_Pooling/config.json". glob_match() is applied to each path component. In the order of the
// patterns.
Result<std::vector<std::string>> files_like(const std::string& directory, std::span<const std::string_view> patterns);

// Returns the files of a reshard output in this directory: those that its manifest records and that have the recorded
// size, the manifest itself, and config.json. Nothing if there is no manifest or it records no files. A corrupt error
// if it cannot be parsed.
Result<std::optional<std::vector<std::string>>> files_of_manifest(const std::string& directory);

}  // namespace reshard
