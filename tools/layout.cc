// SPDX-License-Identifier: Apache-2.0
// reshard layout: shows how a checkpoint is sharded, as text or as a file for --layout.
#include <cstdio>

#include "lib/base/printable.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/infer/layout_inference.h"
#include "tools/commands.h"
#include "tools/inspection.h"
#include "tools/job_options.h"

namespace reshard::tools {
namespace {

constexpr std::size_t kLabelWidth = 12, kSubject = 40;
constexpr std::size_t kShownPatterns = 12;

struct LayoutOptions {
  std::string path, builtin, mesh;
  std::size_t hypothesis = 1;
  bool json = false;
  SourceOptions source_layout;
};

const char* color_of(const std::string& confidence) {
  return confidence == "certain" ? "32" : confidence == "likely" ? "33" : "2";
}

const LayoutEvidence* evidence_for(const LayoutDescriptor& layout, std::string_view about) {
  for (const LayoutEvidence& e : layout.evidence)
    if (e.about == about) return &e;
  return nullptr;
}

// Prints a subject on the left and text on the right. The first line of a section has a label.
void print_line(const std::string& label, const std::string& subject, const char* color, std::string_view text) {
  const std::size_t indent = kLabelWidth + kSubject, start = std::max(indent, kLabelWidth + width_of(subject) + 1);
  std::printf("%s%s%s\n", colored(padded(label, kLabelWidth), "1").c_str(),
              colored(padded(subject, start - kLabelWidth), color).c_str(), in_column(text, indent, start).c_str());
}

void print_line(const std::string& label, const std::string& subject, const LayoutEvidence* evidence) {
  if (evidence)
    return print_line(label, subject, color_of(evidence->confidence), evidence->confidence + ": " + evidence->because);
  std::printf("%s%s\n", colored(padded(label, kLabelWidth), "1").c_str(), in_column(subject, kLabelWidth).c_str());
}

// Lists the patterns of parameters, and counts those of optimizer state.
std::string names_text(const std::vector<std::string>& patterns) {
  std::vector<std::string> shown;
  std::size_t optimizer = 0, more = 0;
  for (const std::string& p : patterns) {
    if (split_state_key(p).kind == StateKind::kOptimizer)
      ++optimizer;
    else if (shown.size() < kShownPatterns)
      shown.push_back(printable(p));
    else
      ++more;
  }
  if (more > 0) shown.push_back(with_commas(more) + " more patterns");
  if (optimizer > 0) shown.push_back(count_of(optimizer, "pattern") + " of optimizer state");
  return join(shown, ", ");
}

void print_names(const std::vector<std::string>& patterns) {
  const std::string space(kLabelWidth + 2, ' ');
  std::printf("%s%s\n", space.c_str(), in_column(names_text(patterns), space.size()).c_str());
}

void print_mesh(const LayoutDescriptor& layout) {
  std::string label = "mesh";
  for (const LayoutEvidence& e : layout.evidence) {
    if (e.about == "vocabulary" || e.about.starts_with("tensors[")) continue;
    print_line(label, e.about, &e);
    label.clear();
  }
  if (!label.empty())
    print_line(label, layout.mesh ? layout.mesh->to_string() : "unknown; set it with --mesh", nullptr);
}

void print_tensors(const LayoutDescriptor& layout) {
  std::string label = "tensors";
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    print_line(label, to_string(layout.tensors[i].splits), evidence_for(layout, "tensors[" + std::to_string(i) + "]"));
    print_names(layout.tensors[i].names);
    label.clear();
  }
}

std::string vocabulary_text(const Vocabulary& v) {
  std::vector<std::string> parts;
  if (v.size) parts.push_back(count_of(*v.size, "row") + " of tokens");
  if (v.padded_size) parts.push_back(count_of(*v.padded_size, "row"));
  if (v.divisible_by) parts.push_back("a multiple of " + with_commas(*v.divisible_by) + " x tp");
  if (v.padding != PaddingContent::kUnknown) parts.push_back("padding " + std::string(padding_content_name(v.padding)));
  return parts.empty() ? "not padded" : join(parts, ", ");
}

void print_pipeline(const Pipeline& pipeline) {
  if (pipeline.rule) {
    print_line("pipeline", "layers by rule " + std::string(stage_rule_name(*pipeline.rule)), nullptr);
    print_line("", "  first stage: " + names_text(pipeline.first), nullptr);
    print_line("", "  last stage: " + names_text(pipeline.last), nullptr);
    return;
  }
  constexpr std::size_t kListedStages = 16;
  for (std::size_t s = 0; s < std::min(pipeline.stages.size(), kListedStages); ++s)
    print_line(s == 0 ? "pipeline" : "", "stage " + std::to_string(s) + ": " + names_text(pipeline.stages[s]), nullptr);
  if (pipeline.stages.size() > kListedStages)
    print_line("", "and " + with_commas(pipeline.stages.size() - kListedStages) + " more stages", nullptr);
}

void print_layout(const LayoutDescriptor& layout) {
  print_mesh(layout);
  print_tensors(layout);
  if (layout.vocabulary) {
    print_line("vocabulary", vocabulary_text(*layout.vocabulary), evidence_for(layout, "vocabulary"));
    print_names(layout.vocabulary->tensors);
  }
  if (layout.pipeline) print_pipeline(*layout.pipeline);
  if (layout.kv_heads && layout.kv_heads->replication > 1)
    print_line("kv heads", "each held by " + count_of(layout.kv_heads->replication, "rank"), nullptr);
  for (const std::string& note : layout.notes)
    std::printf("%s%s\n", colored(padded("note", kLabelWidth), "1").c_str(), in_column(note, kLabelWidth).c_str());
}

std::string files_text(const LayoutDescriptor& layout) {
  return layout.stored_as == StoredAs::kWhole ? "files contain whole tensors" : "files contain the shards of ranks";
}

void print_json(const LayoutDescriptor& layout) {
  Json out = answer_json("layout");
  const Json file = layout.to_json();
  const auto members = file.as_object();
  for (const auto& [key, value] : *members) out.set(key, value);
  show_json(out, 2);
}

Result<int> show_builtin(const LayoutOptions& options) {
  if (!find_builtin_layout(options.builtin)) return unknown_word("built-in layout", options.builtin, layout_names());
  const LayoutDescriptor layout = TRY(load_layout(options.builtin, options.mesh));
  if (options.json) {
    print_json(layout);
  } else {
    std::printf("%s   %s\n", colored(layout.name, "1").c_str(), files_text(layout).c_str());
    std::printf("%s\n", in_column(layout.description, 0).c_str());
    print_layout(layout);
  }
  return 0;
}

std::string name_for(const std::string& path) {
  const std::string name = printable(base_name(path));
  return is_utf8(name) && !name.empty() ? name : "checkpoint";
}

Result<int> show_checkpoint(const LayoutOptions& options) {
  const Inspection in = TRY(look_at(options.path, options.source_layout));
  const auto layouts = TRY(infer_layouts(in.catalog(), in.mesh, name_for(options.path)));
  if (options.hypothesis > layouts.size())
    return usage_error("--hypothesis " + std::to_string(options.hypothesis) + ": expected at most " +
                       std::to_string(layouts.size()) + ", the number of layouts that fit " + printable(options.path));
  const LayoutDescriptor& layout = layouts[options.hypothesis - 1];
  if (options.json) {
    print_json(layout);
    return 0;
  }
  const std::string path = printable(options.path);
  std::printf("%s   %s   %s, %s\n", colored(path, "1").c_str(), std::string(in.format->title).c_str(),
              layout.mesh->to_string().c_str(), files_text(layout).c_str());
  print_layout(layout);
  for (std::size_t h = 0; h < layouts.size(); ++h)
    if (h + 1 != options.hypothesis)
      print_line("or", layouts[h].mesh->to_string() + " fits as well: --hypothesis " + std::to_string(h + 1), nullptr);
  return 0;
}

Result<int> layout(const LayoutOptions& options) {
  if (options.path.empty() == options.builtin.empty())
    return usage_error("expected PATH or --builtin NAME, and not both");
  if (!options.builtin.empty()) return show_builtin(options);
  if (!options.mesh.empty())
    return usage_error("--mesh needs --builtin; the mesh of a checkpoint is inferred from its shards");
  return show_checkpoint(options);
}

}  // namespace

void add_layout(CommandLine& line) {
  auto options = std::make_shared<LayoutOptions>();
  line.add_option("PATH", options->path, "Checkpoint to read the layout from").read();
  line.add_option("--hypothesis", options->hypothesis, "Show the N-th layout that fits").positive().shows_default();
  line.add_option("--builtin", options->builtin, "Show a built-in layout instead")
      .takes("NAME")
      .common()
      .suggests(layout_names());
  line.add_option("--mesh", options->mesh, "Mesh of --builtin, e.g. tp=4,dp_shard=2").takes("MESH").common();
  line.add_flag("--json", options->json, "Print the layout as a file for --layout").common();
  options->source_layout.add(line);
  line.examples({{"reshard layout step-1000", ""},
                 {"reshard layout step-1000 --json > l.json; reshard convert other out --to dcp --layout l.json", ""},
                 {"reshard layout --builtin torchtitan-llama --mesh tp=4,dp_shard=2 --json", ""}});
  line.description("Only metadata is read.");
  line.action([options] { return layout(*options); });
}

}  // namespace reshard::tools
