#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

inline DrawRule parse_rule(const std::string& name) {
    if (name == "gumbel_top_k") return DrawRule::gumbel_top_k;
    if (name == "stochastic_beam") return DrawRule::stochastic_beam;
    OPENVINO_ASSERT(name == "independent", "attribute rule is '", name,
                    "': expected gumbel_top_k, stochastic_beam or independent");
    return DrawRule::independent;
}

class DrawStep : public Operator {
  public:
    OPENVINO_OP("DrawStep", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        rule_ = parse_rule(rule_name_);
        const std::size_t all = kDraft + (beam() ? 5 : 3);
        OPENVINO_ASSERT(get_input_size() == kDraft || get_input_size() == all, get_friendly_name(), " has ",
                        get_input_size(), " inputs: expected ", kDraft, " or, behind the first level, ", all);
        const ov::element::Type f32 = ov::element::f32, i32 = ov::element::i32;
        const ov::element::Type inputs[] = {f32, i32, f32, f32, i32, f32, i32, f32, i32, f32, f32};
        const int64_t ranks[] = {2, 2, 3, 1, 1, 1, 3, 3, 2, 2, 2};
        for (std::size_t i = 0; i < get_input_size(); ++i) {
            expect_type(this, i, inputs[i]);
            OPENVINO_ASSERT(get_input_partial_shape(i).rank() == ranks[i], get_friendly_name(), ": input ", i,
                            " has shape ", get_input_partial_shape(i), ": expected ", ranks[i], " dimensions");
        }
        const auto shapes = output_shapes<ov::PartialShape>([this](std::size_t i) { return get_input_partial_shape(i); });
        const ov::element::Type outputs[] = {i32, f32, i32, f32, f32};
        set_output_size(shapes.size());
        for (std::size_t i = 0; i < shapes.size(); ++i)
            set_output_type(i, i + 3 < shapes.size() ? outputs[i] : i32, shapes[i]);
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<DrawStep>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("rule", rule_name_);
        visitor.on_attribute("count", count_);
        return true;
    }
    int64_t rows_input(std::size_t output) const override {
        return output + 3 < get_output_size() ? kTemperature : kUnknownRows;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto shapes = output_shapes<ov::Shape>([&](std::size_t i) { return inputs[i].get_shape(); });
        for (std::size_t i = 0; i < shapes.size(); ++i) outputs[i].set_shape(shapes[i]);
        const ov::Shape values = inputs[0].get_shape(), noise = inputs[2].get_shape();
        DrawStepArgs args{};
        args.values = inputs[0].data<const float>();
        args.ids = inputs[1].data<const int32_t>();
        args.rows = static_cast<int64_t>(values[0]);
        args.support = static_cast<int64_t>(values[1]);
        args.sequences = static_cast<int64_t>(inputs[kTemperature].get_shape()[0]);
        args.noise = inputs[2].data<const float>();
        args.noise_rows = static_cast<int64_t>(noise[1]);
        args.temperature = inputs[kTemperature].data<const float>();
        args.top_k = inputs[4].data<const int32_t>();
        args.top_p = inputs[5].data<const float>();
        args.rule = rule_;
        args.count = count_;
        if (inputs.size() > kDraft) {
            args.expanded = static_cast<int64_t>(inputs[kDraft].get_shape()[1]);
            args.drawn = static_cast<int64_t>(inputs[kDraft + 2].get_shape()[1]);
            args.ids_before = inputs[kDraft].data<const int32_t>();
            args.log_probs_before = inputs[kDraft + 1].data<const float>();
            args.draws_before = inputs[kDraft + 2].data<const int32_t>();
            if (beam()) {
                args.totals = inputs[kDraft + 3].data<const float>();
                args.gumbels = inputs[kDraft + 4].data<const float>();
            }
        }
        args.next_ids = outputs[0].data<int32_t>();
        args.next_log_probs = outputs[1].data<float>();
        args.next_draws = outputs[2].data<int32_t>();
        if (beam()) {
            args.next_totals = outputs[3].data<float>();
            args.next_gumbels = outputs[4].data<float>();
        }
        const auto drawn = outputs.end() - 3;
        args.tokens = drawn[0].data<int32_t>();
        args.origins = drawn[1].data<int32_t>();
        args.sequence_of = drawn[2].data<int32_t>();
        run_kernel(args);
    }

  private:
    static constexpr std::size_t kTemperature = 3, kDraft = 6;  // inputs; the draft's are the last

    bool beam() const { return rule_ == DrawRule::stochastic_beam; }
    template <class Shape, class Input>
    std::vector<Shape> output_shapes(Input input) const {
        using Size = typename Shape::value_type;
        const bool first = get_input_size() == kDraft;
        const Size batch = input(kTemperature)[0], support = input(0)[1], count(count_), one(1);
        const Size expanded = first ? Size(0) : input(kDraft)[1], drawn = first ? Size(0) : input(kDraft + 2)[1];
        const Size nodes = drawn + one - expanded, size = rule_ == DrawRule::gumbel_top_k ? nodes * count : count;
        const Shape level{batch, expanded + nodes, support}, rows{batch * size};
        std::vector<Shape> shapes{level, level, Shape{batch, drawn + size}};
        if (beam()) shapes.insert(shapes.end(), 2, Shape{batch, size});
        shapes.insert(shapes.end(), 3, rows);
        return shapes;
    }
    std::string rule_name_;
    DrawRule rule_ = DrawRule::independent;
    int64_t count_ = 0;
};

}  // namespace redraft
