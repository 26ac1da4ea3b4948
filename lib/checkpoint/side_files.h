// The files that lie beside the tensors of a model, whatever the format: its config, its tokenizer, and the manifest
// that reshard writes. They are copied as they are, so a link among them must not lead out of the checkpoint.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

inline constexpr std::string_view kConfigFile = "config.json";
inline constexpr std::string_view kManifestFile = "reshard_manifest.json";
inline constexpr Index kMaxManifestBytes = Index{1} << 30;

// Where the file at `path`, found in `directory`, really is, if that is outside: neither below the directory nor, for a
// snapshot of the Hugging Face cache, among its blobs (snapshots/REVISION/file -> ../../blobs/HASH).
std::optional<std::string> leads_out(const std::string& path, const std::string& directory);

// The files that reshard recorded in the manifest it wrote into this directory, and that have the length recorded.
std::vector<std::string> files_of_manifest(const std::string& directory);

}  // namespace reshard
