// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/mesh_audit.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_map>

#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/layout/stages.h"

namespace reshard {
namespace {

// Returns the distinct nonempty boxes, sorted.
std::vector<Box> distinct(std::vector<Box> boxes) {
  std::erase_if(boxes, [](const Box& b) { return b.empty(); });
  std::sort(boxes.begin(), boxes.end());
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  return boxes;
}

std::vector<Box> boxes_of(const Tensor& t) {
  std::vector<Box> boxes;
  for (std::size_t i = 0; i < t.fragments.size(); ++i) boxes.push_back(t.fragments.box(i));
  return distinct(std::move(boxes));
}

// How the sharding of a tensor differs from the declared one.
enum class Cause {
  kNotReplicated,  // dp_replicate cuts like dp_shard: plain FSDP
  kNotSharded,     // FSDP did not cut it
  kNotParallel,    // tensor parallelism did not cut it
  kOtherDim,       // tensor parallelism cut another dimension: column and row confused
  kOrder,          // FSDP cut before tensor parallelism
  kJoinedPlainly,  // a fused tensor was cut as a single one
  kGathered,       // stored whole
  kIncomplete,     // as declared, but some pieces are missing
  kOther,
};

struct Suspect {
  Cause cause = Cause::kOther;
  Placement placement;
};

bool cuts_by(const Split& s, std::string_view axis) {
  return std::find(s.axes.begin(), s.axes.end(), axis) != s.axes.end();
}

Placement without(Placement p, std::string_view axis) {
  std::erase_if(p.splits, [&](const Split& s) { return cuts_by(s, axis); });
  return p;
}

// Returns possible mistakes in a placement, the simplest first.
std::vector<Suspect> suspects(const Placement& declared, const Mesh& mesh, int rank) {
  std::vector<Suspect> out;
  if (mesh.size("dp_replicate") > 1) {
    Placement p = declared;
    for (Split& s : p.splits)
      if (cuts_by(s, "dp_shard")) s.axes.insert(s.axes.begin(), "dp_replicate");
    out.push_back({Cause::kNotReplicated, std::move(p)});
  }
  out.push_back({Cause::kNotSharded, without(declared, "dp_shard")});
  if (mesh.size("tp") > 1) {
    out.push_back({Cause::kNotParallel, without(declared, "tp")});
    Placement plain = declared;
    for (Split& s : plain.splits) s.groups = 1;
    out.push_back({Cause::kJoinedPlainly, std::move(plain)});
    Placement reversed = declared;
    std::reverse(reversed.splits.begin(), reversed.splits.end());
    out.push_back({Cause::kOrder, std::move(reversed)});
    for (int d = 0; d < rank; ++d) {
      Placement moved = without(declared, "tp");
      moved.splits.insert(moved.splits.begin(), Split{{"tp"}, d});
      out.push_back({Cause::kOtherDim, std::move(moved)});
    }
  }
  out.push_back({Cause::kGathered, Placement{{}, declared.stage}});
  std::erase_if(out, [&](const Suspect& s) { return s.placement == declared; });
  return out;
}

int tp_dim(const Placement& p) {
  for (const Split& s : p.splits)
    if (cuts_by(s, "tp")) return s.dim;
  return -1;
}

// Returns "4 x 2 boxes on dims 0 and 1", or "whole".
std::string grid_text(const std::vector<Box>& boxes, const Dims& shape) {
  if (boxes.size() == 1 && boxes[0].shape == shape) return "whole";
  std::vector<std::string> parts;
  for (int d = 0; d < shape.rank(); ++d) {
    std::set<Index> begins;
    for (const Box& b : boxes) begins.insert(b.begin(d));
    if (begins.size() > 1) parts.push_back(count_of(std::ssize(begins), "piece") + " of dim " + std::to_string(d));
  }
  return parts.empty() ? count_of(std::ssize(boxes), "box") : join(parts, " x ");
}

class MeshAuditor {
 public:
  MeshAuditor(const Catalog& catalog, const DeclaredLayout& declared, const InferredMesh& observed)
      : catalog_(catalog), declared_(declared), mesh_(declared.mesh), observed_(observed) {
    for (const CatalogFile& f : catalog_.files) {
      writer_.push_back(f.writer);
      out_.writers_compared = out_.writers_compared || f.writer >= 0;
    }
  }

  MeshAudit run() {
    check_world();
    for (std::size_t i = 0; i < catalog_.tensors().size(); ++i) compare(i);
    set_flat_states_aside();
    report_other_mesh();
    report_unlike();
    report_silent_ranks();
    if (!unlike_.empty()) out_.ranks_skipped = "the tensors are not sharded as declared";
    if (observed_.ranks > mesh_.ranks()) out_.ranks_skipped = "the files come from more ranks than declared";
    if (out_.ranks_skipped.empty()) {
      check_stages();
      check_writers();
    }
    out_.findings = findings_.take();
    return std::move(out_);
  }

 private:
  // ---- Number of ranks

  void check_world() {
    const Index ranks = mesh_.ranks(), seen = observed_.ranks;
    // Fewer ranks are not a finding by themselves: ranks that hold only copies write nothing.
    if (!out_.writers_compared || seen <= ranks) return;
    std::vector<std::string> factors;
    for (const MeshAxis& a : mesh_.axes()) factors.push_back(a.name + "=" + std::to_string(a.size));
    const std::string product = join(factors, " x ") + " = " + count_of(ranks, "rank");
    Finding& f = findings_.add(Severity::kError, "world-size");
    f.what = "the declared degrees multiply to " + with_commas(ranks) + ", but the files come from " +
             count_of(seen, "rank");
    f.why.push_back(product + "; the highest file number is " + with_commas(seen - 1));
    f.why.push_back(found_text());
    f.advice = seen % ranks == 0
                   ? "Another degree of " + with_commas(seen / ranks) + " is missing from the declaration."
                   : "The job ran with a different number of ranks than the declared mesh.";
  }

  // Returns "the stored boxes fit dp_shard=16".
  std::string found_text() const {
    std::vector<std::string> texts;
    for (const Mesh& m : observed_.hypotheses) texts.push_back(m.to_string());
    return texts.empty() ? "no mesh explains the stored boxes" : "the stored boxes fit " + join(texts, "; or ");
  }

  // ---- Boxes

  // Returns the boxes of a tensor that all ranks together hold.
  std::vector<Box> boxes_on_mesh(const Placement& placement, const Dims& shape) const {
    std::vector<Box> out;
    for (Index rank = 0; rank < mesh_.ranks(); ++rank) {
      if (!is_first_replica(mesh_, placement, rank)) continue;
      for (const LocalBox& b : owned_boxes(mesh_, placement, shape, rank)) out.push_back(b.box);
    }
    return distinct(std::move(out));
  }

  struct Known {
    const Tensor* tensor = nullptr;
    Placement placement;
    Suspect verdict;
    bool is_like = false;
  };

  void compare(std::size_t i) {
    const Tensor& t = catalog_.tensors()[i];
    if (t.elements() == 0) return;
    auto placed = declared_.place(t);
    if (!placed) {
      ++out_.not_placed;
      return;
    }
    ++out_.tensors;
    out_.pieces += std::ssize(t.fragments);
    placements_.emplace(i, *placed);
    Placement shape_only = *placed;
    shape_only.stage = -1;  // the stage does not affect the boxes
    const auto [verdict, is_like] = verdict_of(t, shape_only);
    if (verdict.cause == Cause::kIncomplete) {
      incomplete_.push_back({i, *placed, verdict.placement});
      return;
    }
    // Column-parallel and row-parallel tensors are reported separately.
    const int dim = verdict.cause == Cause::kOtherDim ? tp_dim(*placed) : -1;
    if (!is_like) unlike_[{verdict.cause, dim}].push_back({i, *placed, verdict.placement});
  }

  // Tensors of a model's layers share shape, boxes and placement, so each kind is examined once.
  std::pair<Suspect, bool> verdict_of(const Tensor& t, const Placement& placement) {
    std::vector<Known>& alike = known_[t.fragments.hash_of_boxes()];
    for (const Known& k : alike)
      if (k.tensor->shape == t.shape && k.placement == placement && k.tensor->fragments.has_boxes_of(t.fragments))
        return {k.verdict, k.is_like};
    Known k{&t, placement, {}, false};
    const std::vector<Box> stored = boxes_of(t);
    const std::vector<Box> declared = boxes_on_mesh(placement, t.shape);
    k.is_like = stored == declared;
    if (!k.is_like && std::includes(declared.begin(), declared.end(), stored.begin(), stored.end()))
      k.verdict = {Cause::kIncomplete, placement};
    else if (!k.is_like)
      for (Suspect& s : suspects(placement, mesh_, t.shape.rank()))
        if (stored == boxes_on_mesh(s.placement, t.shape)) {
          k.verdict = std::move(s);
          break;
        }
    alike.push_back(k);
    return {k.verdict, k.is_like};
  }

  // ---- Tensors that differ

  struct Unlike {
    std::size_t tensor = 0;
    Placement declared, found;
  };

  // If the pieces are runs of elements in rank order, returns the number of ranks.
  std::optional<std::size_t> ranks_of_flat_runs(const Tensor& t) const {
    struct Run {
      Index begin = 0, length = 0, writer = -1;
    };
    std::vector<Run> runs;
    const Dims strides = row_major_strides(t.shape);
    for (std::size_t i = 0; i < t.fragments.size(); ++i) {
      const Box box = t.fragments.box(i);
      if (box.empty()) continue;
      int d = 0;
      while (d < t.shape.rank() && box.shape[d] == 1) ++d;
      for (++d; d < t.shape.rank(); ++d)
        if (box.shape[d] != t.shape[d]) return std::nullopt;
      Run run{0, volume(box.shape), writer_[t.fragments.extent(i).file]};
      for (d = 0; d < t.shape.rank(); ++d) run.begin += box.origin[d] * strides[d];
      runs.push_back(run);
    }
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
    std::set<Index> writers;
    Index end = 0, last = 0;
    for (const Run& run : runs) {
      if (run.begin != end || run.writer < last) return std::nullopt;
      end += run.length;
      last = run.writer;
      writers.insert(run.writer);
    }
    return writers.size();
  }

  bool is_of_optimizer(const Unlike& u) const {
    return split_state_key(catalog_.tensors()[u.tensor].key()).kind == StateKind::kOptimizer;
  }

  // FSDP1 cuts its flat parameters regardless of rows, and its optimizer keeps its state in that form. The model's
  // tensors are cut into rows when they are saved, and match the declaration.
  void set_flat_states_aside() {
    std::size_t most_ranks = 0, others = 0;
    for (const auto& entry : unlike_)
      for (const Unlike& u : entry.second) {
        if (!is_of_optimizer(u)) {
          ++others;
          continue;
        }
        const auto ranks = ranks_of_flat_runs(catalog_.tensors()[u.tensor]);
        if (!ranks) return;
        most_ranks = std::max(most_ranks, *ranks);
      }
    const auto model = std::count_if(catalog_.tensors().begin(), catalog_.tensors().end(), [](const Tensor& t) {
      return split_state_key(t.key()).kind == StateKind::kModel;
    });
    if (most_ranks < 2 || 2 * static_cast<std::ptrdiff_t>(others) >= model) return;
    for (auto& entry : unlike_)
      std::erase_if(entry.second, [&](const Unlike& u) {
        if (!is_of_optimizer(u)) return false;
        placements_.erase(u.tensor);
        --out_.tensors;
        out_.pieces -= std::ssize(catalog_.tensors()[u.tensor].fragments);
        ++out_.flat;
        return true;
      });
    std::erase_if(unlike_, [](const auto& entry) { return entry.second.empty(); });
  }

  // Returns the mesh without axes of size 1, for comparisons.
  static std::string degrees_of(const Mesh& mesh) {
    std::vector<std::string> out;
    for (const MeshAxis& a : mesh.axes())
      if (a.size > 1) out.push_back(a.name + "=" + std::to_string(a.size));
    std::sort(out.begin(), out.end());
    return join(out, ",");
  }

  // If tensors differ from the declaration in several ways and another mesh explains all of them, reports only that.
  void report_other_mesh() {
    const auto is_declared = [&](const Mesh& m) { return degrees_of(m) == degrees_of(mesh_); };
    if (unlike_.size() < 2 || observed_.hypotheses.empty() || declared_.stages_are_exact ||
        std::any_of(observed_.hypotheses.begin(), observed_.hypotheses.end(), is_declared))
      return;
    Index tensors = 0;
    for (const auto& entry : unlike_) tensors += std::ssize(entry.second);
    Finding& f = findings_.add(Severity::kError, "layout-mesh");
    f.what = "not sharded by the declared mesh " + declared_text();
    f.why = {with_commas(tensors) + " of " + count_of(out_.tensors, "tensor"), found_text()};
    f.advice = "If the run was meant to have that mesh, the checkpoint is fine: declare it.";
    f.causes = {"world-size"};
  }

  void report_unlike() {
    for (const auto& [kind, list] : unlike_) {
      Finding& f = findings_.add(Severity::kError, "layout");
      f.causes = {"world-size", "layout-mesh"};
      for (const Unlike& u : list) f.tensors.push_back(catalog_.tensors()[u.tensor].name);
      switch (kind.first) {
        case Cause::kNotReplicated:
          explain_not_replicated(list, f);
          break;
        case Cause::kNotSharded:
          explain_not_sharded(list, f);
          break;
        case Cause::kNotParallel:
          f.id = "layout-not-tensor-parallel";
          f.what =
              "not sharded by tensor parallelism, although tp=" + std::to_string(mesh_.size("tp")) + " is declared";
          f.why.push_back("every tp rank held all of " + std::string(list.size() == 1 ? "it" : "them") + ": " +
                          with_commas(mesh_.size("tp")) + " times the declared memory");
          f.advice = "Check the parallelize plan: a module whose name matches no entry silently stays replicated.";
          break;
        case Cause::kOtherDim:
          f.id = "layout-wrong-dimension";
          f.what = "cut on dim " + std::to_string(tp_dim(list[0].found)) + "; its role needs dim " +
                   std::to_string(tp_dim(list[0].declared));
          f.why.push_back(tp_dim(list[0].declared) == 0
                              ? "column-parallel (q, k, v, gate, up: w1, w3) means rows of the weight, dim 0"
                              : "row-parallel (o, down: w2) means columns of the weight, dim 1");
          f.advice =
              "The global tensor is complete and correct; the parallel plan of the run confused column and row, which "
              "costs a collective for each layer, or computes something else.";
          break;
        case Cause::kOrder:
          explain_order(f);
          break;
        case Cause::kJoinedPlainly:
          f.id = "layout-fused-plain";
          f.what = "a fused tensor was cut as a single one, so that ranks hold parts of different sections";
          f.why.push_back("declared: " + count_of(groups(list[0].declared), "section") + ", each cut in " +
                          std::to_string(mesh_.size("tp")) + "; found: the whole cut in " +
                          std::to_string(mesh_.size("tp")));
          f.lost =
              "No data is lost if the ranks really held these columns. If they held a part of each section and the "
              "parts were "
              "joined "
              "without regard to sections, shape and size are correct and the order is wrong.";
          f.advice = "Compare a slice with the running model before you use it.";
          break;
        case Cause::kGathered:
          f.id = "layout-gathered";
          f.what = "stored whole by one rank; the declared mesh shards it";
          f.why.push_back("the whole tensor was gathered, or never distributed");
          break;
        case Cause::kIncomplete:  // handled elsewhere
        case Cause::kOther:
          explain_other(list, f);
          break;
      }
      if (f.advice.empty() && f.why.empty()) f.why.push_back(found_text());
      // If most tensors are affected, report the run instead of a list of names.
      if (2 * std::ssize(list) <= out_.tensors) continue;
      f.why.insert(f.why.begin(), with_commas(std::ssize(list)) + " of " + count_of(out_.tensors, "tensor"));
      f.tensors.clear();
    }
  }

  void explain_order(Finding& f) const {
    f.id = "layout-order";
    f.what = "FSDP cut before tensor parallelism; tensor parallelism should cut first";
    f.why.push_back("declared: dim 0 in " + with_commas(mesh_.size("tp")) +
                    " tp blocks, each in FSDP's pieces (torch's _StridedShard); found: FSDP's pieces, each cut "
                    "by tp");
    f.advice =
        "The global tensor is complete, but a loader that assumes the declared order would give ranks each "
        "other's rows.";
  }

  static Index groups(const Placement& p) {
    Index most = 1;
    for (const Split& s : p.splits) most = std::max(most, s.groups);
    return most;
  }

  Index parameter_bytes() const {
    Index sum = 0;
    for (const Tensor& t : catalog_.tensors())
      if (split_state_key(t.key()).kind == StateKind::kModel) sum += t.bytes();
    return sum;
  }

  Index fsdp_ranks() const { return mesh_.size("dp_shard") * mesh_.size("cp"); }

  void explain_not_replicated(const std::vector<Unlike>& list, Finding& f) {
    const Index replicas = mesh_.size("dp_replicate"), shards = fsdp_ranks(), all = replicas * shards;
    f.id = "layout-not-replicated";
    f.what = "declared HSDP, " + with_commas(replicas) + " replicas x " + count_of(shards, "shard") +
             "; found plain FSDP over " + with_commas(all);
    f.why.push_back(
        "tensors have " + with_commas(all) + " distinct dim-0 boxes; expected " + with_commas(shards) +
        ", each held by " + count_of(replicas, "rank") +
        (each_box_by_its_rank(list) ? "; box i was always written by rank i, so nothing is replicated" : ""));
    const Index bytes = parameter_bytes() / mesh_.size("tp") / mesh_.size("pp");
    f.why.push_back("memory: each rank held 1/" + with_commas(all) + " of the parameters instead of 1/" +
                    with_commas(shards) + " (" + human_bytes(bytes / all) + " instead of " +
                    human_bytes(bytes / shards) + ")");
    f.why.push_back("traffic: every all-gather and reduce-scatter crossed all " + count_of(all, "rank") +
                    " instead of staying within groups of " + with_commas(shards) + "; each rank received " +
                    human_bytes(bytes / all * (all - 1)) + " a pass from the whole job");
    f.lost = "";
    f.advice =
        "No data is lost and the checkpoint is complete. Find out why dp_replicate was not applied "
        "(torchtitan: parallelism.data_parallel_replicate_degree) before the next run.";
  }

  bool each_box_by_its_rank(const std::vector<Unlike>& list) const {
    if (!out_.writers_compared) return false;
    for (const Unlike& u : list) {
      const FragmentList& boxes = catalog_.tensors()[u.tensor].fragments;
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        const Index rank = writer_[boxes.extent(i).file];
        if (rank >= mesh_.ranks() || !owns(u.found, catalog_.tensors()[u.tensor].shape, rank, boxes.box(i), mesh_))
          return false;
      }
    }
    return true;
  }

  void explain_not_sharded(const std::vector<Unlike>& list, Finding& f) const {
    const Index shards = fsdp_ranks();
    f.id = "layout-not-sharded";
    f.what = "not sharded by FSDP, although dp_shard=" + with_commas(mesh_.size("dp_shard")) + " is declared";
    f.why.push_back("found " + grid_text(boxes_of(catalog_.tensors()[list[0].tensor]), shape_of(list[0])) +
                    "; every FSDP rank held all of it, " + with_commas(shards) + " times the declared memory");
    f.why.push_back(found_text());
    f.advice = "A module that fully_shard was not applied to, or a job that ran with replication only.";
  }

  // The declared layout, or the mesh as the command line has it: "--mesh dp_replicate=2,dp_shard=8".
  std::string declared_text() const {
    if (declared_.title != mesh_.to_string()) return declared_.title;
    return "--mesh " + join(split(declared_.title, ' '), "");
  }

  const Dims& shape_of(const Unlike& u) const { return catalog_.tensors()[u.tensor].shape; }

  void explain_other(const std::vector<Unlike>& list, Finding& f) {
    const Tensor& t = catalog_.tensors()[list[0].tensor];
    f.id = "layout-other";
    f.what = "sharding does not match " + declared_text();
    f.why.push_back("'" + printable(t.name) + "' " + to_string(t.shape) + ": found " + grid_text(boxes_of(t), t.shape) +
                    ", declared " + grid_text(boxes_on_mesh(Placement{list[0].declared.splits, -1}, t.shape), t.shape));
    f.why.push_back(found_text());
  }

  // Returns, for each missing piece, the ranks that hold it: the one that writes it, then its replicas.
  std::vector<std::vector<Index>> holders_of_missing(const Unlike& u) const {
    const std::vector<Box> stored = boxes_of(catalog_.tensors()[u.tensor]);
    std::map<Box, std::vector<Index>> out;
    for (Index rank = 0; rank < mesh_.ranks(); ++rank)
      for (const LocalBox& b : owned_boxes(mesh_, u.declared, shape_of(u), rank))
        if (!b.box.empty() && !std::binary_search(stored.begin(), stored.end(), b.box)) out[b.box].push_back(rank);
    std::vector<std::vector<Index>> holders;
    for (auto& entry : out) holders.push_back(std::move(entry.second));
    return holders;
  }

  // Reports ranks that wrote nothing and whose pieces are missing. If a rank's elements are stored, but in other boxes
  // than declared, the declaration is wrong, and the rank is not reported.
  void report_silent_ranks() {
    if (!out_.writers_compared) return;
    std::set<Index> wrote, silent;
    for (const Tensor& t : catalog_.tensors())
      for (std::size_t i = 0; i < t.fragments.size(); ++i) wrote.insert(writer_[t.fragments.extent(i).file]);
    std::vector<std::vector<std::vector<Index>>> missing;  // of each incomplete tensor
    for (const Unlike& u : incomplete_)
      for (const std::vector<Index>& ranks : missing.emplace_back(holders_of_missing(u)))
        if (!wrote.contains(ranks[0])) silent.insert(ranks[0]);
    // Any replica of a piece may have been the one to write it.
    const auto is_silent = [&](const std::vector<Index>& ranks) {
      return std::any_of(ranks.begin(), ranks.end(), [&](Index rank) { return silent.contains(rank); });
    };
    for (std::size_t i = 0; i < missing.size(); ++i)
      if (std::all_of(missing[i].begin(), missing[i].end(), is_silent))
        out_.lacking.push_back(catalog_.tensors()[incomplete_[i].tensor].name);
    if (silent.empty()) return;
    Finding& f = findings_.add(Severity::kError, "ranks-silent");
    f.what = count_of(std::ssize(silent), "rank") + " wrote nothing although " +
             (silent.size() == 1 ? "it holds pieces of its" : "they hold pieces of their") +
             " own: " + rank_list(silent);
    f.why.emplace_back(
        "the pieces that they own on the declared mesh are missing: " + with_commas(std::ssize(out_.lacking)) + " of " +
        count_of(out_.tensors, "tensor") + " lack pieces");
    f.advice =
        "They died during the save, or their files were not copied. Add --allow cover to convert to leave such tensors "
        "out and "
        "write the others.";
  }

  static std::string rank_list(const std::set<Index>& ranks) {
    std::vector<std::string> names;
    for (const Index r : ranks) names.push_back("rank." + std::to_string(r));
    std::string text = folded(names);
    return text.starts_with("rank.") ? "rank" + std::string(ranks.size() > 1 ? "s " : " ") + text.substr(5) : text;
  }

  // ---- Writers

  static bool owns(const Placement& placement, const Dims& shape, Index rank, const Box& box, const Mesh& mesh) {
    for (const LocalBox& b : owned_boxes(mesh, placement, shape, rank))
      if (b.box == box) return true;
    return false;
  }

  // Returns whether every piece was written by a rank that holds it on `mesh`, with the cuts reversed if `fsdp_first`.
  bool writers_fit(const Mesh& mesh, bool fsdp_first, std::string* first) const {
    for (const auto& [i, placed] : placements_) {
      const Tensor& t = catalog_.tensors()[i];
      Placement p = placed;
      if (!declared_.stages_are_exact) p.stage = -1;
      if (fsdp_first) std::reverse(p.splits.begin(), p.splits.end());
      if (p.splits.empty() && p.stage < 0) continue;
      for (std::size_t k = 0; k < t.fragments.size(); ++k) {
        const Box box = t.fragments.box(k);
        const Index rank = writer_[t.fragments.extent(k).file];
        if (box.empty() || rank < 0) continue;
        if (rank < mesh.ranks() && owns(p, t.shape, rank, box, mesh)) continue;
        if (first)
          *first = "'" + printable(t.name) + "' " + to_string(box) + " was written by rank " + std::to_string(rank);
        return false;
      }
    }
    return true;
  }

  void check_writers() {
    std::string first;
    if (!out_.writers_compared || observed_.ranks > mesh_.ranks() || writers_fit(mesh_, false, &first)) return;
    Finding& f = findings_.add(Severity::kError, "ranks-order");
    f.what = "pieces were written by ranks that do not hold them on the declared mesh";
    f.why.push_back(first);
    if (writers_fit(mesh_, true, nullptr)) return explain_order(f);
    std::vector<MeshAxis> axes = mesh_.axes();
    std::erase_if(axes, [](const MeshAxis& a) { return a.size == 1; });
    std::sort(axes.begin(), axes.end(), [](const MeshAxis& a, const MeshAxis& b) { return a.name < b.name; });
    do {
      const Mesh other(axes);
      if (!writers_fit(other, false, nullptr)) continue;
      f.why.push_back("ranks numbered over (" + other.to_string() +
                      "), the last axis fastest, explain every writer; declared (" + mesh_.to_string() + ")");
      f.advice =
          "The order of the axes decides which ranks are neighbours: tensor parallelism belongs on the fastest "
          "axis, within a machine.";
      return;
    } while (std::next_permutation(axes.begin(), axes.end(),
                                   [](const MeshAxis& a, const MeshAxis& b) { return a.name < b.name; }));
    f.advice = "Files were renamed or exchanged, or ranks were numbered in an order that these axes cannot give.";
  }

  // Checks that each layer is written by one stage, and that each stage writes.
  void check_stages() {
    const Index stages = mesh_.size("pp");
    if (stages < 2 || !out_.writers_compared || observed_.ranks > mesh_.ranks()) return;
    std::map<Index, std::set<Index>> stages_of_layer;
    std::set<Index> that_wrote;
    for (const auto& [i, placed] : placements_) {
      const Tensor& t = catalog_.tensors()[i];
      for (std::size_t k = 0; k < t.fragments.size(); ++k) {
        const Index rank = writer_[t.fragments.extent(k).file];
        if (rank < 0 || t.fragments.box(k).empty()) continue;
        const Index stage = mesh_.coordinate(rank, "pp");
        that_wrote.insert(stage);
        if (const Index layer = layer_number(t.key()); layer >= 0) stages_of_layer[layer].insert(stage);
      }
    }
    report_stages(stages, that_wrote, stages_of_layer);
  }

  void report_stages(Index stages, const std::set<Index>& that_wrote,
                     const std::map<Index, std::set<Index>>& stages_of_layer) {
    std::vector<std::string> absent, torn;
    for (Index s = 0; s < stages; ++s)
      if (!that_wrote.contains(s)) absent.push_back(std::to_string(s));
    for (const auto& [layer, of] : stages_of_layer)
      if (of.size() > 1) torn.push_back(std::to_string(layer));
    if (!absent.empty()) {
      Finding& f = findings_.add(Severity::kError, "stages-missing");
      f.causes = {"ranks-silent"};
      f.what = "no tensor was written by pipeline stage " + join(absent, ", ") + " of " + with_commas(stages);
      f.why.push_back("a stage is " + count_of(mesh_.ranks() / stages, "rank") + "; stage " + absent[0] + " is ranks " +
                      with_commas(std::stoll(absent[0]) * (mesh_.ranks() / stages)) + " and up");
      f.why.push_back(found_text());
      f.advice =
          "If all layers are present, the job ran without these stages; if layers are missing, the stage was not "
          "saved.";
    }
    if (torn.empty()) return;
    Finding& f = findings_.add(Severity::kError, "stages-torn");
    f.what = "layers written by several pipeline stages: " + join(torn, ", ");
    f.why.push_back("a layer belongs to one stage; " + found_text());
  }

  const Catalog& catalog_;
  const DeclaredLayout& declared_;
  const Mesh& mesh_;
  const InferredMesh& observed_;
  MeshAudit out_;
  FindingList findings_;
  std::vector<Index> writer_;  // of each file; -1: unknown
  std::map<std::size_t, Placement> placements_;
  std::unordered_map<std::uint64_t, std::vector<Known>> known_;
  std::map<std::pair<Cause, int>, std::vector<Unlike>> unlike_;  // keyed by cause and declared dimension
  std::vector<Unlike> incomplete_;                               // tensors that lack pieces
};

}  // namespace

MeshAudit audit_mesh(const Catalog& catalog, const DeclaredLayout& declared, const InferredMesh& observed) {
  return MeshAuditor(catalog, declared, observed).run();
}

}  // namespace reshard
