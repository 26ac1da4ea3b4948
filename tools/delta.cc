// SPDX-License-Identifier: Apache-2.0
// reshard delta and reshard patch.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/registry.h"
#include "lib/convert/delta_chain.h"
#include "tools/commands.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

// Returns the format of deltas: one compressed file, as what did not change must take no space.
const Format& compressed_format() {
  const auto& all = formats();
  return **std::find_if(all.begin(), all.end(), [](const Format* f) { return f->is_file && f->takes_compression; });
}

struct DeltaLine : ConvertOptions {
  std::string old_path, new_path;
};

Result<int> delta(DeltaLine line) {
  line.merge = delta_options(line.old_path, line.new_path);
  line.source = line.new_path;
  line.to = compressed_format().name;
  return convert(line);
}

struct PatchLine : ConvertOptions {
  std::vector<std::string> paths;  // the base, the deltas, the destination
};

Result<int> patch(PatchLine line) {
  if (line.paths.size() < 3) return see_help("expected the old model, at least one delta and a destination", "patch");
  line.destination = line.paths.back();
  line.source = line.paths.front();
  line.merge = patch_options(line.source, {line.paths.begin() + 1, line.paths.end() - 1});
  return convert(line);
}

void add_run(ConvertOptions& options, CommandLine& line, const std::string& force) {
  line.group("Target");
  line.add_flag("--force", options.force, force).common();
  line.group("Run");
  line.add_flag("--dry-run", options.dry_run, "Check everything, write nothing").common();
  line.add_flag("--json", options.as_json, "Print the result as JSON");
}

}  // namespace

void add_delta(CommandLine& line) {
  auto options = std::make_shared<DeltaLine>();
  options->codec = "zstd:1";
  line.add_option("OLD", options->old_path, "Checkpoint that receivers have").read().required();
  line.add_option("NEW", options->new_path, "Checkpoint of the same model that they need").read().required();
  line.add_option("D", options->destination, "File to create").written().required();
  line.group("Target");
  line.add_option("--codec", options->codec, "Compression: zstd:1 to zstd:19")
      .takes("CODEC")
      .completes({"zstd:1", "zstd:9"})
      .shows_default();
  line.group("Rows and types");
  line.add_option("--include", options->include, "Only tensors with these names").names_tensors();
  line.add_option("--exclude", options->exclude, "Leave out tensors with these names").names_tensors();
  line.group("Source");
  options->source_layout.add(line);
  options->model.add(line);
  line.group("Run");
  options->resources.add(line);
  add_run(*options, line, "Replace D if it is a checkpoint");
  line.examples({{"reshard delta step-100 step-101 d101.h5", ""},
                 {"reshard patch step-100 d101.h5 step-101 --to hf", "the receiver's side"}});
  line.description(
      "The delta is one file with the exclusive or of the model's old and new bits, compressed: what did not change "
      "takes almost no space. OLD and NEW may differ in format, layout and names, but not in dtype. Optimizer state is "
      "not part of it. The manifest in D has the digests of both models, so that 'reshard patch' proves its result.");
  line.action([options] { return delta(*options); });
}

void add_patch(CommandLine& line) {
  auto options = std::make_shared<PatchLine>();
  line.add_option("PATHS", options->paths, "The old model, its deltas in order, and the destination to create")
      .read()
      .written(Option::Outputs::kBucketsToo)
      .required();
  options->add_format(line);
  options->add_changes(line);
  add_run(*options, line, "Replace the destination if it is a checkpoint");
  add_state(line, options->state);
  line.examples({{"reshard patch step-100 d101.h5 step-101 --to hf", ""},
                 {"reshard patch step-100 d101.h5 d102.h5 d103.h5 step-103 --to hf", "in one pass"}});
  line.description(
      "Deltas are those that 'reshard delta' wrote. A delta that was made from another model is refused, and the "
      "result is compared with the digests of the new model before it appears. The config and the "
      "tokenizer are copied from the old model.");
  line.action([options] { return patch(*options); });
}

}  // namespace reshard::tools
