// SPDX-License-Identifier: Apache-2.0
#include "tools/inspect_report.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <unordered_map>
#include <utility>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

constexpr std::size_t kShownLines = 100;  // of folded tensors
constexpr std::size_t kShownValue = 48;   // characters
constexpr std::size_t kShownNotes = 8, kShownErrors = 100;
constexpr std::string_view kPlainOptimizer = "optimizer.";  // the usual prefix of an optimizer's names

std::string attribute(const Catalog& catalog, std::string_view name) {
  for (const auto& [key, value] : catalog.attributes)
    if (key == name) return printable(value);
  return "";
}

// ---- folding: one line for the tensors of homogeneous layers

struct Line {
  std::string name, dtype, shape, placement;
};

Line line_of(const Inspection& in, std::size_t i, const std::string& name) {
  const Tensor& t = in.catalog().tensors()[i];
  return {printable(name), std::string(info(t.dtype).short_name), to_string(t.shape), in.mesh.placements[i]};
}

// Folds tensors of one dtype, shape and placement whose names differ only in numbers into one line, in the order of
// their first tensor.
std::vector<Line> fold_tensors(const Inspection& in, const std::vector<std::size_t>& tensors) {
  std::map<std::string, std::vector<std::size_t>> alike;
  for (const std::size_t i : tensors) {
    const Tensor& t = in.catalog().tensors()[i];
    alike[std::string(info(t.dtype).short_name) + to_string(t.shape) + in.mesh.placements[i]].push_back(i);
  }
  std::map<std::size_t, std::string> names;  // by the first tensor
  for (const auto& [what, group] : alike) {
    std::vector<std::string> all;
    for (const std::size_t i : group) all.push_back(in.catalog().tensors()[i].name);
    for (const FoldedName& name : fold(all)) names.emplace(group[name.first], name.text);
  }
  std::vector<Line> lines;
  for (const auto& [i, name] : names) {
    lines.push_back(line_of(in, i, ""));
    lines.back().name = folded({name});
  }
  return lines;
}

// Returns the prefix of an optimizer's tensor names; of several optimizers, the first one's.
std::string optimizer_prefix(const Catalog& catalog) {
  for (const Part& part : catalog.parts)
    if (part.kind == StateKind::kOptimizer) return part.prefix;
  return {};
}

// ---- as text

constexpr std::size_t kLabel = 12, kAxis = 20, kCount = 16, kWhat = 32, kType = 18;

void print_labelled(const std::string& label, const char* color, std::string_view text) {
  std::printf("%s%s\n", colored(padded(label, kLabel), color).c_str(), in_column(text, kLabel).c_str());
}

void print_head(const Inspection& in) {
  const Catalog& catalog = in.catalog();
  std::string format = attribute(catalog, "format");
  if (format.empty()) format = in.format->title;
  std::string writer;
  if (const std::string torch = attribute(catalog, "torch"); !torch.empty()) writer = "   written by torch " + torch;
  if (const std::string python = attribute(catalog, "python"); !python.empty())
    writer += (writer.empty() ? "   written by Python " : ", Python ") + python;
  const auto stale = std::ssize(catalog.stale_files);
  const std::string text = format + ", " + completeness(in) + "   " + with_commas(in.files.count) +
                           (in.files.count == 1 ? " file, " : " files, ") + human_bytes(in.files.bytes) + ", " +
                           (stale == 0 ? "none" : with_commas(stale)) + " stale" + writer;
  const std::string name = printable(in.path);
  std::printf("%s   %s\n", colored(name, "1").c_str(), in_column(text, kLabel, width_of(name) + 3).c_str());
  for (const char* const how : {"joined", "saved", "made from", "delta", "pipeline", "weights"})
    if (const std::string told = attribute(catalog, how); !told.empty()) print_labelled(how, "1", told);
}

// Prints the mesh that was inferred from the boxes, unless the writer recorded it.
void print_mesh(const Inspection& in) {
  if (!attribute(in.catalog(), "saved").empty()) return;
  std::string label = "mesh";
  const auto row = [&](const std::string& axis, Confidence confidence, const std::string& evidence) {
    const char* color = confidence == Confidence::kCertain ? "32" : confidence == Confidence::kLikely ? "33" : "2";
    const bool is_unknown = confidence == Confidence::kUnknown;
    const std::string word = is_unknown ? "" : std::string(confidence_name(confidence)) + ": ";
    std::printf("%s%s%s\n", colored(padded(label, kLabel), "1").c_str(),
                colored(padded(axis, kAxis - 1) + " ", color).c_str(),
                in_column(word + evidence, kLabel + kAxis).c_str());
    label.clear();
  };
  // Axes that shard or replicate come first.
  std::vector<InferredAxis> axes = in.mesh.axes;
  std::stable_partition(axes.begin(), axes.end(), [](const InferredAxis& a) { return a.size > 1; });
  for (const InferredAxis& axis : axes)
    row(axis.name + (axis.size > 0 ? "=" + with_commas(axis.size) : " unknown"), axis.confidence, axis.evidence);
  if (axes.empty() && in.mesh.ranks == 1)
    row("one rank", Confidence::kCertain, "files of one rank, nothing is sharded");
  for (std::size_t i = 1; i < in.mesh.hypotheses.size(); ++i)
    row("or", Confidence::kLikely, in.mesh.hypotheses[i].to_string() + " fits as well");
  for (const std::string& note : in.mesh.notes) {
    print_labelled(label, "1", note);
    label.clear();
  }
}

// Joins at most `shown` names, fewer if they are long; "..." stands for the others.
std::string first_of(const std::vector<std::string>& names, std::size_t shown) {
  constexpr std::size_t kMostLetters = 60;
  std::string out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string name = printable(names[i]);
    if (i == shown || (i > 0 && out.size() + name.size() > kMostLetters)) return out + ", ...";
    out += (i > 0 ? ", " : "") + name;
  }
  return out;
}

std::string types_text(const KindFacts& facts) { return join({facts.dtypes.begin(), facts.dtypes.end()}, ", "); }

void print_state(const Inspection& in) {
  for (std::size_t k = 0; k < in.kinds.size(); ++k) {
    const KindFacts& facts = in.kinds[k];
    if (facts.tensors == 0) continue;
    std::string what = first_of(facts.names, kShownObjects);
    if (k == 0)
      what = in.parameters ? count_of(*in.parameters, "parameter") : count_of(facts.elements, "stored element");
    std::string count = with_commas(facts.tensors) + (facts.tensors == 1 ? " tensor" : " tensors");
    std::printf("%s%s%s%s%s\n", colored(padded(kKindNames[k], kLabel), "1").c_str(), padded(count, kCount).c_str(),
                padded(what, kWhat - 2).append("  ").c_str(), padded(types_text(facts), kType - 2).append("  ").c_str(),
                human_bytes(facts.bytes).c_str());
  }
  if (!in.packed.empty()) print_labelled("packed", "1", in.packed);
  if (!in.adapter.empty()) print_labelled("adapter", "1", in.adapter);
  std::string label = "names";
  for (const Part& part : in.catalog().parts) {
    if (part.prefix.empty() || part.prefix == kPlainOptimizer) continue;
    print_labelled(label, "1",
                   (part.kind == StateKind::kOptimizer ? "optimizer" : printable(part.name)) + " with prefix '" +
                       printable(part.prefix) + "'" + (part.evidence.empty() ? "" : ": " + part.evidence));
    label.clear();
  }
  const Index objects = in.object_count;
  if (objects == 0) return;
  std::vector<std::string> parts;
  for (const auto& [name, value] : in.objects) {
    const bool is_long = value.size() > kShownValue;
    const std::string shown = is_long ? value.substr(0, kShownValue) + "..." : value;
    parts.push_back(printable(name) + (value.empty() ? "" : " = " + printable(shown)));
  }
  if (objects > std::ssize(parts)) parts.emplace_back("...");
  std::printf("%s%s%s\n", colored(padded("objects", kLabel), "1").c_str(), padded(with_commas(objects), kCount).c_str(),
              in_column(join(parts, ", "), kLabel + kCount).c_str());
}

void print_remarks(const Inspection& in) {
  const auto some = [](const std::string& label, const char* color, const std::vector<std::string>& all,
                       std::size_t shown = kShownNotes) {
    for (std::size_t i = 0; i < std::min(all.size(), shown); ++i) print_labelled(label, color, all[i]);
    if (all.size() > shown)
      print_labelled("", color, "and " + with_commas(all.size() - shown) + " more; --json has all");
  };
  some("error", "31", problems(in), kShownErrors);
  std::vector<std::string> warnings;
  for (const std::string& w : in.catalog().warnings) warnings.push_back(printable(w));
  if (!in.catalog().stale_files.empty())
    warnings.push_back("stale files of another save, not read: " + first_of(in.catalog().stale_files, kShownObjects));
  some("warning", "33", warnings);
  std::vector<std::string> notes;
  for (const std::string& note : in.catalog().notes) notes.push_back(printable(note));
  some("note", "2", notes);
}

void print_tensor_lines(const std::vector<Line>& lines) {
  std::size_t name = 0, dtype = 0, shape = 0;
  for (const Line& l : lines) {
    name = std::max(name, width_of(l.name));
    dtype = std::max(dtype, width_of(l.dtype));
    shape = std::max(shape, width_of(l.shape));
  }
  for (const Line& l : lines)
    std::printf("%s  %s  %s  %s\n", padded(l.name, name).c_str(), padded(l.dtype, dtype).c_str(),
                padded(l.shape, shape).c_str(), l.placement.c_str());
}

void print_shards(const Catalog& catalog, const Tensor& tensor) {
  for (const FragmentList* list : {&tensor.fragments, &tensor.replicas})
    for (std::size_t i = 0; i < list->size(); ++i) {
      const Extent& e = list->extent(i);
      std::printf("    %s  %s @ %s  %s bytes%s\n", padded(to_string(list->box(i)), 24).c_str(),
                  printable(catalog.files[e.file].path).c_str(), with_commas(e.offset).c_str(),
                  with_commas(e.length).c_str(), list == &tensor.replicas ? "  copy" : "");
    }
}

std::vector<std::size_t> wanted_tensors(const Inspection& in, const ReportOptions& options) {
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i < in.catalog().tensors().size(); ++i)
    if (const Tensor& t = in.catalog().tensors()[i];
        in.shows(t) && (options.filters.empty() || any_glob_matches(options.filters, t.name)))
      out.push_back(i);
  return out;
}

void print_tensors(const Inspection& in, const ReportOptions& options) {
  const auto& tensors = in.catalog().tensors();
  std::vector<std::size_t> wanted = wanted_tensors(in, options);
  if (!wanted.empty()) std::printf("\n");
  if (options.shards) {
    for (const std::size_t i : wanted) {
      print_tensor_lines({line_of(in, i, tensors[i].name)});
      print_shards(in.catalog(), tensors[i]);
    }
    return;
  }
  if (!options.filters.empty()) {
    std::vector<Line> lines;
    for (const std::size_t i : wanted) lines.push_back(line_of(in, i, tensors[i].name));
    return print_tensor_lines(lines);
  }
  const std::size_t all = wanted.size();
  std::erase_if(wanted, [&](std::size_t i) { return split_state_key(tensors[i].key()).kind == StateKind::kOptimizer; });
  if (wanted.empty()) wanted = wanted_tensors(in, options);
  std::vector<Line> lines = fold_tensors(in, wanted);
  const std::size_t folded = lines.size();
  lines.resize(std::min(folded, kShownLines));
  print_tensor_lines(lines);
  if (lines.size() < folded)
    std::printf("... %s more lines; --filter GLOB shows them\n", with_commas(folded - lines.size()).c_str());
  if (wanted.size() < all)
    std::printf("... and %s tensors of the optimizer; --filter '%s*' shows them\n",
                with_commas(all - wanted.size()).c_str(), printable(optimizer_prefix(in.catalog())).c_str());
}

// ---- as JSON

Json files_json(const Inspection& in) {
  Json short_files = Json::array();
  for (const std::uint32_t f : in.files.cut_short) {
    Json file = Json::object();
    file.set("file", in.catalog().files[f].path);
    file.set("bytes", in.catalog().files[f].size).set("expected", in.files.needed[f]);
    short_files.push_back(std::move(file));
  }
  Json out = Json::object();
  out.set("count", in.files.count).set("bytes", in.files.bytes).set("missing", in.files.missing);
  out.set("cut_short", std::move(short_files)).set("stale", texts_json(in.catalog().stale_files));
  return out;
}

Json mesh_json(const InferredMesh& mesh) {
  Json axes = Json::array(), hypotheses = Json::array();
  for (const InferredAxis& axis : mesh.axes) {
    Json a = Json::object();
    a.set("name", axis.name).set("size", axis.size > 0 ? Json(axis.size) : Json());
    a.set("confidence", confidence_name(axis.confidence)).set("evidence", axis.evidence);
    axes.push_back(std::move(a));
  }
  for (const Mesh& m : mesh.hypotheses) hypotheses.push_back(m.to_string());
  Json out = Json::object();
  out.set("ranks", mesh.ranks > 0 ? Json(mesh.ranks) : Json()).set("axes", std::move(axes));
  out.set("hypotheses", std::move(hypotheses)).set("notes", texts_json(mesh.notes));
  return out;
}

Json state_json(const Inspection& in) {
  Json out = Json::object();
  for (std::size_t k = 0; k < in.kinds.size(); ++k) {
    const KindFacts& facts = in.kinds[k];
    Json kind = Json::object();
    kind.set("tensors", facts.tensors).set("elements", facts.elements).set("bytes", facts.bytes);
    kind.set("dtypes", texts_json(facts.dtypes)).set("names", texts_json(facts.names));
    if (k == 0) kind.set("parameters", in.parameters ? Json(*in.parameters) : Json());
    if (k == 0 && !in.packed.empty()) kind.set("packed", in.packed);
    if (k == 0 && !in.adapter.empty()) kind.set("adapter", in.adapter);
    out.set(kKindNames[k], std::move(kind));
  }
  return out;
}

Json parts_json(const Catalog& catalog) {
  Json out = Json::array();
  for (const Part& part : catalog.parts) {
    Json p = Json::object();
    p.set("kind", kKindNames[static_cast<std::size_t>(part.kind)]).set("name", part.name).set("prefix", part.prefix);
    p.set("evidence", part.evidence);
    out.push_back(std::move(p));
  }
  return out;
}

Json objects_json(const Inspection& in) {
  Json values = Json::array();
  for (const auto& [name, value] : in.objects) {
    Json object = Json::object();
    object.set("name", name).set("value", value.empty() ? Json() : Json(value));
    values.push_back(std::move(object));
  }
  Json out = Json::object();
  out.set("count", in.object_count).set("values", std::move(values));
  return out;
}

Json shards_json(const Catalog& catalog, const Tensor& tensor) {
  Json out = Json::array();
  for (const FragmentList* list : {&tensor.fragments, &tensor.replicas})
    for (std::size_t i = 0; i < list->size(); ++i) {
      const Box box = list->box(i);
      const Extent& e = list->extent(i);
      Json shard = Json::object();
      shard.set("origin", dims_json(box.origin)).set("shape", dims_json(box.shape));
      shard.set("file", catalog.files[e.file].path).set("offset", e.offset).set("bytes", e.length);
      shard.set("copy", list == &tensor.replicas);
      out.push_back(std::move(shard));
    }
  return out;
}

Json tensor_json(const Inspection& in, std::size_t i, const ReportOptions& options) {
  const Tensor& t = in.catalog().tensors()[i];
  Json out = Json::object();
  out.set("name", t.name).set("kind", kKindNames[static_cast<std::size_t>(split_state_key(t.key()).kind)]);
  out.set("dtype", info(t.dtype).torch_name).set("shape", dims_json(t.shape));
  out.set("placement", in.mesh.placements[i]).set("boxes", t.fragments.size()).set("bytes", t.bytes());
  if (options.shards) out.set("shards", shards_json(in.catalog(), t));
  return out;
}

// Returns everything except the tensors.
Json head_json(const Inspection& in) {
  Json format = Json::object();
  format.set("name", in.format->name).set("title", in.format->title);
  Json attributes = Json::object();
  for (const auto& [key, value] : in.catalog().attributes) attributes.set(key, value);
  Json out = answer_json("inspect");
  out.set("path", in.path)
      .set("format", std::move(format))
      .set("complete", in.files.is_complete() && in.catalog().unread_files.empty());
  out.set("attributes", std::move(attributes)).set("files", files_json(in)).set("mesh", mesh_json(in.mesh));
  out.set("parts", parts_json(in.catalog()))
      .set("state", state_json(in))
      .set("objects", objects_json(in))
      .set("problems", texts_json(problems(in)));
  out.set("warnings", texts_json(in.catalog().warnings)).set("notes", texts_json(in.catalog().notes));
  return out;
}

// ---- for pages

// Encodes a list of numbers as runs: first, step, count.
class Runs {
 public:
  void add(Index value) {
    if (count_ == 1) step_ = value - last_;
    if (count_ > 0 && value - last_ == step_) {
      ++count_;
    } else {
      close();
      first_ = value, step_ = 0, count_ = 1;
    }
    last_ = value;
  }
  Json take() {
    close();
    return std::move(runs_);
  }

 private:
  void close() {
    if (count_ == 0) return;
    for (const Index n : {first_, step_, count_}) runs_.push_back(n);
    count_ = 0;
  }
  Json runs_ = Json::array();
  Index first_ = 0, step_ = 0, count_ = 0, last_ = 0;
};

// Stores each distinct value once.
class DistinctValues {
 public:
  std::size_t add(Json value) {
    const auto [at, is_new] = places_.emplace(to_text(value), values_.size());
    if (is_new) values_.push_back(std::move(value));
    return at->second;
  }
  Json take() { return std::move(values_); }

 private:
  std::unordered_map<std::string, std::size_t> places_;
  Json values_ = Json::array();
};

Json columns_json(const FragmentList& list, int rank) {
  std::vector<Runs> columns(2 * static_cast<std::size_t>(rank));
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Box box = list.box(i);
    for (int d = 0; d < rank; ++d) {
      columns[d].add(box.origin[d]);
      columns[static_cast<std::size_t>(rank) + static_cast<std::size_t>(d)].add(box.shape[d]);
    }
  }
  Json out = Json::array();
  for (Runs& column : columns) out.push_back(column.take());
  return out;
}

Json file_numbers_json(const FragmentList& list) {
  Runs files;
  for (std::size_t i = 0; i < list.size(); ++i) files.add(list.extent(i).file);
  return files.take();
}

}  // namespace

Json page_json(const Inspection& in, const ReportOptions& options) {
  DistinctValues layouts, lists;
  Json tensors = Json::array(), list = Json::array();
  for (const std::size_t i : wanted_tensors(in, options)) {
    const Tensor& t = in.catalog().tensors()[i];
    Json layout = Json::object();
    layout.set("dtype", info(t.dtype).short_name).set("shape", dims_json(t.shape)).set("bytes", t.bytes());
    layout.set("placement", in.mesh.placements[i]).set("boxes", columns_json(t.fragments, t.shape.rank()));
    layout.set("copies", columns_json(t.replicas, t.shape.rank()));
    Json row = Json::array();
    row.push_back(t.name);
    row.push_back(kKindNames[static_cast<std::size_t>(split_state_key(t.key()).kind)]);
    row.push_back(layouts.add(std::move(layout)));
    row.push_back(lists.add(file_numbers_json(t.fragments)));
    row.push_back(lists.add(file_numbers_json(t.replicas)));
    tensors.push_back(std::move(row));
  }
  for (const CatalogFile& file : in.catalog().files) {
    Json row = Json::array();
    row.push_back(file.path);
    row.push_back(file.size);
    row.push_back(file.writer);
    list.push_back(std::move(row));
  }
  Json out = head_json(in);
  Json files = files_json(in);
  out.set("files", files.set("list", std::move(list)));
  out.set("layouts", layouts.take()).set("lists", lists.take());
  return out.set("tensors", std::move(tensors));
}

void print_text(const Inspection& in, const ReportOptions& options) {
  print_head(in);
  print_mesh(in);
  print_state(in);
  print_remarks(in);
  print_tensors(in, options);
}

void print_json(const Inspection& in, const ReportOptions& options) {
  const std::vector<std::size_t> wanted = wanted_tensors(in, options);
  show_json(head_json(in),
            {"tensors", wanted.size(), [&](std::size_t i) { return tensor_json(in, wanted[i], options); }}, 2);
}

}  // namespace reshard::tools
